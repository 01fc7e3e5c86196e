"""Map names of checkpoint tensors to the network's parameters."""

from saccade.models.backbones import qwen_weights
from saccade.models.network import Target

PREFIXES = (
    ("model.language_model.", "language_model."),
    ("model.visual.", "visual."),
    ("lm_head.", "lm_head."),
)
TRANSPOSED = (".experts.gate_up_proj", ".experts.down_proj")
"""The releases store each expert's matrices as [inputs, outputs]."""


def locate(name: str, loads_head: bool) -> Target | None:
    """Return the target of the checkpoint tensor *name*; None for the head unless *loads_head*."""
    target = qwen_weights.locate(name, PREFIXES, loads_head)
    if target is not None and name.endswith(TRANSPOSED):
        return target._replace(transposed=True)
    return target

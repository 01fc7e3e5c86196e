"""Map names of checkpoint tensors to the network's parameters."""

from saccade.models.backbones import qwen_weights
from saccade.models.network import Target

PREFIXES = (
    ("model.language_model.", "language_model."),
    ("model.visual.", "visual."),
    ("lm_head.", "lm_head."),
)
DRAFT = "mtp."
"""Of a layer that predicts one more token, for speculative decoding, which this engine does not do."""
DELTA_NET = ((".in_proj_b.", 0), (".in_proj_a.", 1))


def locate(name: str, loads_head: bool) -> Target | None:
    """Return the target of the checkpoint tensor *name*; None for a draft's, and for the head unless *loads_head*."""
    if name.startswith(DRAFT):
        return None
    for theirs, partition in DELTA_NET:
        if theirs in name:
            target = qwen_weights.locate(name.replace(theirs, ".in_proj_ba."), PREFIXES, loads_head)
            return None if target is None else target._replace(partition=partition)
    return qwen_weights.locate(name, PREFIXES, loads_head)

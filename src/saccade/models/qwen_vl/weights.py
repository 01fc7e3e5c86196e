"""Maps checkpoint tensor names to the networks' parameters."""

from saccade.models.backbones.names import DELTA_NET, FUSED, target_of
from saccade.models.network import Target

PREFIXES2 = (
    ("model.language_model.", "language_model."),
    ("model.visual.", "visual."),
    ("visual.", "visual."),
    ("model.", "language_model."),
)
"""The releases' names, and those that transformers writes since 4.52."""
PREFIXES3 = PREFIXES2[:2]

RENAMED = (
    (".mlp.fc1.", ".mlp.linear_fc1.", None),
    (".mlp.fc2.", ".mlp.linear_fc2.", None),
    (".merger.ln_q.", ".merger.norm.", None),
    (".merger.mlp.0.", ".merger.linear_fc1.", None),
    (".merger.mlp.2.", ".merger.linear_fc2.", None),
)
TRANSPOSED = (".experts.gate_up_proj", ".experts.down_proj")
"""The releases store each expert's matrices as [inputs, outputs]."""

DRAFT = "mtp."
"""Of the draft layer, which predicts one more token."""


def target2(name: str) -> Target:
    """Return the target of a Qwen2-VL or Qwen2.5-VL tensor."""
    return target_of(name, PREFIXES2, (*RENAMED, *FUSED))


def target3(name: str) -> Target:
    """Return the target of a Qwen3-VL tensor."""
    return target_of(name, PREFIXES3)._replace(transposed=name.endswith(TRANSPOSED))


def hybrid_target(name: str, *, drafts: bool) -> Target | None:
    """Return the target of a Qwen3.5 tensor; None for the draft layer's tensors, unless the network *drafts*."""
    if name.startswith(DRAFT) and not drafts:
        return None
    return target_of(name, PREFIXES3, (*DELTA_NET, *FUSED))

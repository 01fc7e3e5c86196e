"""Map names of checkpoint tensors to the network's parameters."""

from saccade.models.backbones import qwen_weights
from saccade.models.network import Target

PREFIXES = (
    ("model.language_model.", "language_model."),
    ("model.visual.", "visual."),
    ("visual.", "visual."),
    ("model.", "language_model."),
    ("lm_head.", "lm_head."),
)
"""The releases' names, and those that transformers writes since 4.52."""

RENAMED = (
    (".mlp.fc1.", ".mlp.linear_fc1."),
    (".mlp.fc2.", ".mlp.linear_fc2."),
    (".merger.ln_q.", ".merger.norm."),
    (".merger.mlp.0.", ".merger.linear_fc1."),
    (".merger.mlp.2.", ".merger.linear_fc2."),
)


def locate(name: str, loads_head: bool) -> Target | None:
    """Return the target of the checkpoint tensor *name*; None for the head unless *loads_head*."""
    for theirs, ours in RENAMED:
        name = name.replace(theirs, ours)
    return qwen_weights.locate(name, PREFIXES, loads_head)

"""Map names of checkpoint tensors to the network's parameters."""

import re

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
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
"""A matrix of a single expert: some releases store them one by one, others [experts, outputs, inputs]."""
EXPERT_PARTS = {"gate": ("gate_up_proj", 0), "up": ("gate_up_proj", 1), "down": ("down_proj", None)}


def locate(name: str, tied: bool) -> Target | None:
    """Return the target of the checkpoint tensor *name*; None if it is a draft's, or duplicates the tied embedding."""
    if name.startswith(DRAFT):
        return None
    if (expert := EXPERT.fullmatch(name)) is not None:
        experts, index, kind = expert.groups()
        parameter, partition = EXPERT_PARTS[kind]
        target = qwen_weights.locate(f"{experts}.{parameter}", PREFIXES, tied)
        return None if target is None else target._replace(partition=partition, expert=int(index))
    for theirs, partition in DELTA_NET:
        if theirs in name:
            target = qwen_weights.locate(name.replace(theirs, ".in_proj_ba."), PREFIXES, tied)
            return None if target is None else target._replace(partition=partition)
    return qwen_weights.locate(name, PREFIXES, tied)

"""Map names of checkpoint tensors to the parameters of backbones.qwen_network."""

import re
from collections.abc import Sequence

from saccade.models.network import Target

FUSED = (
    (".q_proj.", ".qkv_proj.", 0),
    (".k_proj.", ".qkv_proj.", 1),
    (".v_proj.", ".qkv_proj.", 2),
    (".gate_proj.", ".gate_up_proj.", 0),
    (".up_proj.", ".gate_up_proj.", 1),
)

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
"""A matrix of a single expert, [outputs, inputs]: some checkpoints store experts one by one, others all in one."""
EXPERT_PARTS = {"gate": ("gate_up_proj", 0), "up": ("gate_up_proj", 1), "down": ("down_proj", None)}


def locate(name: str, prefixes: Sequence[tuple[str, str]], loads_head: bool) -> Target | None:
    """Return the target of the checkpoint tensor *name*; None for the head unless *loads_head*.

    *prefixes* are pairs of the checkpoint's and the network's; the first that fits is replaced.
    """
    if not loads_head and name == "lm_head.weight":
        return None
    for theirs, ours in prefixes:
        if name.startswith(theirs):
            name = ours + name.removeprefix(theirs)
            break
    if (single := EXPERT.fullmatch(name)) is not None:
        parameter, partition = EXPERT_PARTS[single[3]]
        return Target(f"{single[1]}.{parameter}", partition, int(single[2]))
    for theirs, ours, partition in FUSED:
        if theirs in name:
            return Target(name.replace(theirs, ours), partition)
    return Target(name)

"""Maps checkpoint tensors' names to decoder parameters, including parts of fused matrices and single experts."""

import re
from collections.abc import Sequence

from saccade.models.network import Target

Prefixes = Sequence[tuple[str, str]]
Fused = Sequence[tuple[str, str, int | None]]

FUSED: Fused = (
    (".q_proj.", ".qkv_proj.", 0),
    (".k_proj.", ".qkv_proj.", 1),
    (".v_proj.", ".qkv_proj.", 2),
    (".gate_proj.", ".gate_up_proj.", 0),
    (".up_proj.", ".gate_up_proj.", 1),
)
DELTA_NET: Fused = ((".in_proj_b.", ".in_proj_ba.", 0), (".in_proj_a.", ".in_proj_ba.", 1))
"""Of hybrid decoders, which have those of FUSED, too."""

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
"""A matrix of a single expert, [outputs, inputs]: some checkpoints store experts one by one, others all in one."""
EXPERT_PARTS = {"gate": ("gate_up_proj", 0), "up": ("gate_up_proj", 1), "down": ("down_proj", None)}


def target_of(name: str, prefixes: Prefixes = (), fused: Fused = FUSED) -> Target:
    """Return the target of the checkpoint tensor *name*.

    *prefixes* holds pairs of the checkpoint's prefix and the network's; the first that matches is replaced. A single
    expert's matrix becomes part of the parameter for all experts. In any other name, the first matching part of *fused*
    is replaced, and may name a partition.
    """
    for theirs, ours in prefixes:
        if name.startswith(theirs):
            name = ours + name.removeprefix(theirs)
            break
    if (single := EXPERT.fullmatch(name)) is not None:
        parameter, partition = EXPERT_PARTS[single[3]]
        return Target(f"{single[1]}.{parameter}", partition, int(single[2]))
    for theirs, ours, part in fused:
        if theirs in name:
            return Target(name.replace(theirs, ours), part)
    return Target(name)

"""Map names of checkpoint tensors to the parameters of backbones.qwen_network."""

from collections.abc import Sequence

from saccade.models.network import Target

FUSED = (
    (".q_proj.", ".qkv_proj.", 0),
    (".k_proj.", ".qkv_proj.", 1),
    (".v_proj.", ".qkv_proj.", 2),
    (".gate_proj.", ".gate_up_proj.", 0),
    (".up_proj.", ".gate_up_proj.", 1),
)


def locate(name: str, prefixes: Sequence[tuple[str, str]], tied: bool) -> Target | None:
    """Return the target of the checkpoint tensor *name*; None if it duplicates the tied embedding.

    *prefixes* are pairs of the checkpoint's and the network's; the first that fits is replaced.
    """
    if tied and name == "lm_head.weight":
        return None
    for theirs, ours in prefixes:
        if name.startswith(theirs):
            name = ours + name.removeprefix(theirs)
            break
    for theirs, ours, partition in FUSED:
        if theirs in name:
            return Target(name.replace(theirs, ours), partition)
    return Target(name)

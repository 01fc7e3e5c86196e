"""Experts of a checkpoint in the form of releases."""

from collections.abc import Iterator

import torch


def one_by_one(key: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the release's tensors: experts, which transformers stacks, are stored one by one."""
    prefix, fused, part = key.partition(".mlp.experts.")
    if not fused:
        yield key, tensor
        return
    for number, expert in enumerate(tensor):
        if part == "down_proj":
            yield f"{prefix}{fused}{number}.down_proj.weight", expert
        else:
            for name, half in zip(("gate", "up"), expert.chunk(2), strict=True):
                yield f"{prefix}{fused}{number}.{name}_proj.weight", half

"""Waits of the host for a GPU, found without one: torch's meta device, whose tensors have no values, stands for it."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

CPU, META = torch.device("cpu"), torch.device("meta")
MASKS = (torch.bool, torch.uint8)


class NoWaiting(TorchFunctionMode):
    """Refuses what makes the host wait, or what CUDA does not capture, and counts copies that it does not wait for.

    Reading a value of the meta device fails by itself.
    """

    num_copies = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.__name__, kwargs or {}
        found = func(*args, **kwargs)
        if name in ("__getitem__", "__setitem__"):
            _check_index(args[0], args[1] if isinstance(args[1], tuple) else (args[1],))
        if name in ("tensor", "as_tensor", "asarray", "new_tensor"):
            is_new = not isinstance(args[0], torch.Tensor) or name == "new_tensor"
            assert not (is_new and found.device == META), "a tensor that is copied from the host"
        # Subclasses are descriptions, such as that of a causal mask.
        given = [one for one in tree_leaves((args, kwargs)) if type(one) in (torch.Tensor, torch.nn.Parameter)]
        target = args[0] if name in ("__setitem__", "copy_") else found
        is_copy = name in ("to", "copy_", "__setitem__") or any(one.dim() for one in given)
        is_to_device = isinstance(target, torch.Tensor) and target.device == META
        if is_copy and is_to_device and any(one.device == CPU for one in given):
            assert kwargs.get("non_blocking"), "a copy from the host that waits for the device"
            self.num_copies += 1
        return found


def _check_index(indexed: torch.Tensor, index: tuple[Any, ...]) -> None:
    if indexed.device == META:
        assert not any(isinstance(part, list) for part in index), "an index that is copied from the host"
        masks = [part for part in index if isinstance(part, torch.Tensor) and part.dtype in MASKS]
        assert not masks, "an index by a mask, whose values are counted"

"""Copies host arrays to the device in one transfer, without waiting.

A GPU copies asynchronously only from pinned memory. CUDA copies any other source to pinned memory first, while the host
waits. Some GPUs read the source themselves instead, at a time when its memory may already have another use.
"""

from collections.abc import Sequence as Ordered
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return *array* on *device*. The host does not wait for the copy."""
    return transfer([array], device)[0]


def transfer(arrays: Ordered[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Return *arrays*, all of one dtype, as views of one tensor on *device*. The host does not wait for the copy."""
    joined = arrays[0].ravel() if len(arrays) == 1 else np.concatenate([array.ravel() for array in arrays])
    flat = torch.from_numpy(joined)
    if device.type != "cpu":
        flat = (flat.pin_memory() if device.type == "cuda" else flat).to(device, non_blocking=True)
    parts = flat.split_with_sizes([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]

"""Copy KV state between the caches and bytes, for transfers from one engine to another.

The bytes hold, for every layer in order, the blocks' keys and then their values, or their latents. Layers that attend
to all tokens come first, then those with a window. If the copy includes a row, its recurrent states follow. Values have
the caches' number format and the machine's byte order.
"""

from collections.abc import Iterator

import numpy as np
import torch

from saccade.engine.core.step import KvReceive, KvSend
from saccade.engine.executor.caches import Caches
from saccade.nn.context import KvCache, LatentCache, RecurrentState
from saccade.nn.transfer import to_device, transfer


def block_nbytes(caches: Caches) -> int:
    """Return the size in bytes of one block, over all layers that have blocks and no window."""
    return sum(tensor[0].nbytes for tensor in _blocks(caches))


def window_nbytes(caches: Caches) -> int:
    """Return the size in bytes of one block, over all layers with a window; 0 without such layers."""
    return sum(tensor[0].nbytes for tensor in _blocks(caches, in_window=True))


def state_nbytes(caches: Caches) -> int:
    """Return the size in bytes of one row's recurrent states; 0 for a model without such layers."""
    return sum(tensor[0].nbytes for tensor in _states(caches))


@torch.inference_mode()
def read_blocks(caches: Caches, send: KvSend) -> bytes:
    """Return a copy of the blocks and states of *send*."""
    parts = [tensor.index_select(0, index).flatten() for tensor, index in _places(caches, send)]
    return torch.cat(parts).cpu().numpy().tobytes() if parts else b""


@torch.inference_mode()
def write_blocks(caches: Caches, receive: KvReceive) -> None:
    """Write the content of *receive* to the caches. Raises ValueError, before any write, if its size is wrong."""
    places = list(_places(caches, receive))
    sizes = [len(index) * tensor[0].nbytes for tensor, index in places]
    if sum(sizes) != len(receive.content):
        raise ValueError(f"KV state of {len(receive.content)} bytes was received instead of {sum(sizes)}")
    if not receive.content:
        return
    content = to_device(np.frombuffer(receive.content, np.uint8).copy(), caches.device)
    for (tensor, index), part in zip(places, content.split(sizes), strict=True):
        tensor.index_copy_(0, index, part.view(len(index), *tensor.shape[1:]))


def _places(caches: Caches, copy: KvSend | KvReceive) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each tensor that a copy touches, viewed as bytes, with the indices in its first dimension."""
    rows = () if copy.row is None else (copy.row,)
    indices = [np.array(one, np.int64) for one in (copy.blocks, copy.window_blocks, rows)]
    kinds = (_blocks(caches), _blocks(caches, in_window=True), _states(caches))
    for tensors, index in zip(kinds, transfer(indices, caches.device), strict=True):
        if len(index):
            yield from ((tensor, index) for tensor in tensors)


def _blocks(caches: Caches, *, in_window: bool = False) -> Iterator[torch.Tensor]:
    for cache, window in zip(caches.layers, caches.windows, strict=True):
        if (window is not None) != in_window:
            continue
        match cache:
            case KvCache():
                yield cache.keys.view(torch.uint8)
                yield cache.values.view(torch.uint8)
            case LatentCache():
                yield cache.latents.view(torch.uint8)


def _states(caches: Caches) -> Iterator[torch.Tensor]:
    for cache in caches.layers:
        if isinstance(cache, RecurrentState):
            yield from (live.view(torch.uint8) for live in cache.live)

"""The tensors of all layers' caches: blocks of keys and values or of latents, recurrent states and their snapshots."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

import numpy as np
import torch

from saccade.engine.core.step import StateMove, StepInput
from saccade.engine.executor.transfer import transfer
from saccade.models.facts import NETWORK_DTYPE, KvSpec, Latent, Paged, Recurrent
from saccade.nn.context import KvCache, LatentCache, LayerCache, RecurrentState

NO_SCALES: Mapping[int, tuple[float, float]] = MappingProxyType({})


@dataclass(frozen=True)
class CacheSizes:
    """*rows* live states and *snapshots* for each recurrent layer, *num_blocks* blocks for each other layer.

    *num_padding* further rows and blocks follow, for rows that belong to no sequence (executor.decode_graphs).
    """

    num_blocks: int
    block_size: int
    num_rows: int
    num_snapshots: int
    num_padding: int = 0


class Caches:
    """One cache per layer, initially zero. Steps define the contents.

    Blocks have *dtype*: the network's, or float8_e4m3fn with the checkpoint's scales of keys and values, *scales*, by
    layer. Recurrent states have the dtypes of their specs.
    """

    def __init__(
        self,
        specs: Ordered[KvSpec],
        sizes: CacheSizes,
        dtype: torch.dtype,
        device: torch.device,
        scales: Mapping[int, tuple[float, float]] = NO_SCALES,
    ) -> None:
        self.sizes = sizes
        self.layers = [
            _scaled(_layer_cache(spec, sizes, dtype, device), scales.get(layer, (1.0, 1.0)))
            for layer, spec in enumerate(specs)
        ]
        self._device = device
        states = [cache for cache in self.layers if isinstance(cache, RecurrentState)]
        self._pairs = [pair for state in states for pair in zip(state.live, state.snapshots, strict=True)]

    @property
    def has_recurrent_layers(self) -> bool:
        return bool(self._pairs)

    def begin_rows(self, step: StepInput) -> None:
        """Zero the live states of started rows, and restore the snapshots that the step names."""
        if not self._pairs or not step.started:
            return
        started, rows, kept = self._indices([start.row for start in step.started], *_sides(step.restore))
        for live, snapshots in self._pairs:
            live.index_fill_(0, started, 0)
            live.index_copy_(0, rows, snapshots.index_select(0, kept))

    def save(self, moves: Ordered[StateMove]) -> None:
        """Copy live states to snapshots."""
        if not self._pairs or not moves:
            return
        rows, kept = self._indices(*_sides(moves))
        for live, snapshots in self._pairs:
            snapshots.index_copy_(0, kept, live.index_select(0, rows))

    def _indices(self, *lists: list[int]) -> list[torch.Tensor]:
        return transfer([np.array(indices, np.int64) for indices in lists], self._device)


def _sides(moves: Iterable[StateMove]) -> tuple[list[int], list[int]]:
    return [move.row for move in moves], [move.snapshot for move in moves]


def state_dtype(name: str, network: torch.dtype) -> torch.dtype:
    """Return the dtype of a tensor of Recurrent in a network of dtype *network*."""
    dtype: torch.dtype = network if name == NETWORK_DTYPE else getattr(torch, name)
    return dtype


def _layer_cache(spec: KvSpec, sizes: CacheSizes, dtype: torch.dtype, device: torch.device) -> LayerCache:
    blocks = (sizes.num_blocks + sizes.num_padding, sizes.block_size)
    match spec:
        case Paged():
            heads = (*blocks, spec.num_kv_heads)
            return KvCache(
                _zeros((*heads, spec.key_width), dtype, device), _zeros((*heads, spec.value_width), dtype, device)
            )
        case Latent():
            return LatentCache(_zeros((*blocks, spec.token_values), dtype, device))
        case Recurrent():
            live, snapshots = (
                tuple(
                    _zeros((count, *shape), state_dtype(name, dtype), device)
                    for shape, name in zip(spec.shapes, spec.dtypes, strict=True)
                )
                for count in (sizes.num_rows + sizes.num_padding, sizes.num_snapshots)
            )
            return RecurrentState(live, snapshots)


def _scaled(cache: LayerCache, scales: tuple[float, float]) -> LayerCache:
    """Return *cache* with the scales of keys and values; latents have that of keys."""
    match cache:
        case KvCache():
            return cache._replace(key_scale=scales[0], value_scale=scales[1])
        case LatentCache():
            return cache._replace(scale=scales[0])
        case _:
            return cache


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy gets zero pages from the system, which use memory only when written to; torch would write all of them.
    return torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)

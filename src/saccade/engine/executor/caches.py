"""The tensors of all layers' caches: blocks of keys and values or of latents, recurrent states and checkpoints."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from saccade.engine.core.step import Chunk, StateMove, StepInput
from saccade.models.spec import NETWORK_DTYPE, KvSpec, Latent, Paged, Recurrent
from saccade.nn.context import KvCache, LatentCache, LayerCache, RecurrentState
from saccade.nn.parallel import Ranks
from saccade.nn.transfer import transfer

Index = TypeVar("Index", npt.NDArray[np.int64], torch.Tensor)

NO_SCALES: Mapping[int, tuple[float, float]] = MappingProxyType({})


class BlockFormat(NamedTuple):
    """How blocks store values: as *dtype*, divided by the layer's *scales* for keys and values, which default to 1."""

    dtype: torch.dtype
    scales: Mapping[int, tuple[float, float]] = NO_SCALES


@dataclass(frozen=True)
class CacheSizes:
    """The capacity of the layers' caches."""

    num_blocks: int
    """Of each layer with blocks that attends to all tokens."""
    block_size: int
    """Tokens of a block."""
    num_rows: int
    """Live states of each recurrent layer."""
    num_checkpoints: int
    """Checkpoints of each recurrent layer."""
    num_padding: int = 0
    """Further rows and blocks, for rows that belong to no sequence (executor.decode_graphs)."""
    num_kept: int = 0
    """States of each row that a step with proposals keeps."""
    num_window_blocks: int = 0
    """Blocks of each layer with a window."""

    def trail_rows(self, rows: Index, numbers: Index) -> Index:
        """Return the rows that keep the states of *rows* after the tokens with *numbers*, which count from 0."""
        return self.num_rows * (numbers + 1) + self.num_padding + rows


def specs_of_rank(kv_specs: Ordered[KvSpec], ranks: Ranks) -> tuple[KvSpec, ...]:
    """Return the KvSpec of each layer on one of *ranks*; *kv_specs* are those of the whole layers."""

    def of_rank(kv_spec: KvSpec) -> KvSpec:
        match kv_spec:
            case Paged():
                return replace(kv_spec, num_kv_heads=ranks.share(kv_spec.num_kv_heads))
            case Recurrent():
                return kv_spec.of_rank(ranks.share)
            case Latent():
                return kv_spec

    return tuple(of_rank(kv_spec) for kv_spec in kv_specs)


class Caches:
    """One cache per layer, initially zero. Steps fill the caches.

    *dtype* is the network's. Blocks have it too, unless *blocks* gives them another format. Recurrent states have the
    dtypes of their specs.
    """

    def __init__(
        self,
        kv_specs: Ordered[KvSpec],
        sizes: CacheSizes,
        dtype: torch.dtype,
        device: torch.device,
        blocks: BlockFormat | None = None,
    ) -> None:
        self.sizes = sizes
        self.windows = tuple(None if isinstance(kv_spec, Recurrent) else kv_spec.window for kv_spec in kv_specs)
        blocks = blocks or BlockFormat(dtype)
        self.layers = [
            _recurrent_state(kv_spec, sizes, dtype, device)
            if isinstance(kv_spec, Recurrent)
            else _block_cache(kv_spec, sizes, blocks, layer, device)
            for layer, kv_spec in enumerate(kv_specs)
        ]
        self.device = device
        states = [cache for cache in self.layers if isinstance(cache, RecurrentState)]
        self._pairs = [pair for state in states for pair in zip(state.live, state.checkpoints, strict=True)]

    @property
    def has_recurrent_layers(self) -> bool:
        return bool(self._pairs)

    def begin_rows(self, step: StepInput) -> None:
        """Zero the live states of started rows, and restore the checkpoints and kept states that the step names."""
        if not self._pairs:
            return
        if step.rewind:
            rows, numbers = self._indices(*_sides(step.rewind))
            trail = self.sizes.trail_rows(rows, numbers)
            for live, _ in self._pairs:
                live.index_copy_(0, rows, live.index_select(0, trail))
        if not step.started:
            return
        started_rows, rows, ids = self._indices([start.row for start in step.started], *_sides(step.restore))
        for live, checkpoints in self._pairs:
            live.index_fill_(0, started_rows, 0)
            live.index_copy_(0, rows, checkpoints.index_select(0, ids))

    def save(self, chunks: Ordered[Chunk]) -> None:
        """Copy the live states at the end of *chunks* to the checkpoints that they name."""
        moves = [
            StateMove(chunk.row, save.checkpoint)
            for chunk in chunks
            for save in chunk.saves
            if save.num_tokens == chunk.num_tokens
        ]
        if not self._pairs or not moves:
            return
        rows, ids = self._indices(*_sides(moves))
        for live, checkpoints in self._pairs:
            checkpoints.index_copy_(0, ids, live.index_select(0, rows))

    def _indices(self, *lists: list[int]) -> list[torch.Tensor]:
        return transfer([np.array(indices, np.int64) for indices in lists], self.device)


def _sides(moves: Iterable[StateMove]) -> tuple[list[int], list[int]]:
    return [move.row for move in moves], [move.checkpoint for move in moves]


def state_dtype(name: str, network: torch.dtype) -> torch.dtype:
    """Return the dtype that *name* stands for in a Recurrent spec; *network* is the network's dtype."""
    dtype: torch.dtype = network if name == NETWORK_DTYPE else getattr(torch, name)
    return dtype


def _block_cache(
    kv_spec: Paged | Latent, sizes: CacheSizes, format: BlockFormat, layer: int, device: torch.device
) -> LayerCache:
    num_blocks = sizes.num_blocks if kv_spec.window is None else sizes.num_window_blocks
    shape = (num_blocks + sizes.num_padding, sizes.block_size)
    scales = format.scales.get(layer, (1.0, 1.0))
    if isinstance(kv_spec, Latent):
        return LatentCache(_zeros((*shape, kv_spec.token_values), format.dtype, device), scales[0])
    widths = (kv_spec.key_width, kv_spec.value_width)
    keys, values = (_zeros((*shape, kv_spec.num_kv_heads, width), format.dtype, device) for width in widths)
    return KvCache(keys, values, *scales)


def _recurrent_state(kv_spec: Recurrent, sizes: CacheSizes, dtype: torch.dtype, device: torch.device) -> RecurrentState:
    live, checkpoints = (
        tuple(
            _zeros((count, *shape), state_dtype(name, dtype), device)
            for shape, name in zip(kv_spec.shapes, kv_spec.dtypes, strict=True)
        )
        for count in (sizes.num_rows * (1 + sizes.num_kept) + sizes.num_padding, sizes.num_checkpoints)
    )
    return RecurrentState(live, checkpoints)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy gets zero pages from the system, which use memory only when written to; torch would write all of them.
    return torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)

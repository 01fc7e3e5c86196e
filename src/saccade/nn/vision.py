"""Shared parts of vision towers: patch geometry on the host, the patch embedding, packed bidirectional attention.

Grids are (frames, rows, columns) in patches, on the CPU. Patches come in merge-block order: for each frame, (rows / m,
columns / m, m, m). Shapes: P patches, Q heads, D head size, E hidden size.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from saccade.nn.context import PackedLayout, VisionAttentionBackend
from saccade.nn.layers import Layer, Linear
from saccade.nn.parallel import ALONE, Ranks
from saccade.nn.transfer import to_device

Grid = tuple[int, int, int]

IN_THE_ENCODER = "heads in its vision encoder (`--mm-encoder-tp-mode data` does not cut it)"
"""The shared unit, in errors."""


def grid_list(grids: Iterable[Sequence[int] | torch.Tensor]) -> list[Grid]:
    """Return grids as host integers, from triples or from the rows of a CPU tensor [n, 3]."""
    return [(int(frames), int(height), int(width)) for frames, height, width in grids]


def patch_coordinates(grid: Grid, merge: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return row and column of every patch of one frame, in merge-block order, each [rows * columns]."""
    _, height, width = grid
    row, column = np.mgrid[0:height, 0:width].reshape(2, height // merge, merge, width // merge, merge).swapaxes(2, 3)
    return row.ravel(), column.ravel()


def bilinear_taps(
    position: npt.NDArray[np.int64], size: int, side: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Return the two table entries [P, 2] and their weights that resample *side* entries to *size*, corners aligned.

    Formula: transformers, vision_utils.py, get_vision_interpolation_indices_and_weights.
    """
    place = position.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    low = place.astype(np.int64)
    high = np.minimum(low + 1, side - 1)
    share = (place - low).astype(np.float32)
    return np.stack((low, high), 1), np.stack((1 - share, share), 1)


@lru_cache(maxsize=32)
def frame_coordinates(grid: Grid, merge: int) -> npt.NDArray[np.float32]:
    """Return row and column [rows * columns, 2] of the patches of one frame, in merge-block order. Do not write to it.

    Successive images often have one size.
    """
    return np.stack(patch_coordinates(grid, merge), 1).astype(np.float32)


class FramePlaces(NamedTuple):
    """The places of one frame's patches, in merge-block order. The arrays are cached: do not write to them.

    *coordinates* float32 [rows * columns, 2] are row and column. *taps* int64 [rows * columns, 4] are entries of the
    table of learned positions; a patch's position is their sum, weighted by *tap_weights* float32 of the same shape.
    """

    coordinates: npt.NDArray[np.float32]
    taps: npt.NDArray[np.int64]
    tap_weights: npt.NDArray[np.float32]


@lru_cache(maxsize=32)
def frame_places(grid: Grid, merge: int, side: int) -> FramePlaces:
    """Return the places of one frame, for a table of side x side. Successive images often have one size."""
    row, column = patch_coordinates(grid, merge)
    rows, row_weights = bilinear_taps(row, grid[1], side)
    columns, column_weights = bilinear_taps(column, grid[2], side)
    indices = rows[:, :, None] * side + columns[:, None, :]
    weights = row_weights[:, :, None] * column_weights[:, None, :]
    coordinates = np.stack((row, column), 1).astype(np.float32)
    return FramePlaces(coordinates, indices.reshape(-1, 4), weights.reshape(-1, 4))


def packed_layout(grids: Sequence[Grid], device: torch.device) -> PackedLayout:
    """Return the attention layout of concatenated images: each frame attends only to itself."""
    return packed_sequences(tuple(height * width for frames, height, width in grids for _ in range(frames)), device)


def packed_sequences(lengths: tuple[int, ...], device: torch.device) -> PackedLayout:
    """Return the attention layout of concatenated sequences, copied to *device* without a sync."""
    borders = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=borders[1:])
    return PackedLayout(to_device(borders, device), max(lengths), lengths)


class PatchEmbedding(nn.Module):
    """A convolution whose kernel equals its stride, over patches, as one matrix.

    Some checkpoints' kernels span two frames; an image shows the same frame twice, so the kernel summed over time
    gives the same result from half the multiplications. Patches of videos have both frames, and take the whole kernel.
    """

    def __init__(self, hidden_size: int, kernel: tuple[int, ...], bias: bool = True) -> None:
        """*kernel* is (channels, height, width) or (channels, frames, height, width)."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, *kernel), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(hidden_size), requires_grad=False) if bias else None
        self.folded: Linear | None = None
        self.whole: Linear | None = None

    def fold(self) -> None:
        """Make the matrices from the loaded kernel; patches of one frame take its sum over time, in float32."""
        kernel = self.weight.float().sum(2).to(self.weight.dtype) if self.weight.ndim == 5 else self.weight
        self.folded = self._linear(kernel.flatten(1))
        self.whole = self._linear(self.weight.flatten(1)) if self.weight.ndim == 5 else None

    def forward(self, patches_PC: torch.Tensor) -> torch.Tensor:
        """Map normalised patches [P, channels * (frames *) height * width] to [P, E]. Call `fold` first."""
        if self.whole is not None and patches_PC.shape[1] == self.whole.weight.shape[1]:
            return self.whole(patches_PC)  # type: ignore[no-any-return]
        return self.folded(patches_PC)  # type: ignore[no-any-return,misc]

    def _linear(self, kernel_EC: torch.Tensor) -> Linear:
        linear = Linear(kernel_EC.shape[1], kernel_EC.shape[0], bias=False)
        linear.weight, linear.bias = nn.Parameter(kernel_EC, requires_grad=False), self.bias
        return linear


class PackedSelfAttention(Layer):
    """Bidirectional attention within each packed sequence, with rotary positions and biases; heads cut over *ranks*."""

    def __init__(self, hidden_size: int, num_heads: int, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.num_heads = ranks.divide(num_heads, IN_THE_ENCODER)
        self.head_dim = hidden_size // num_heads
        widths, units = (hidden_size,) * 3, (num_heads,) * 3
        self.qkv = Linear(hidden_size, widths, split="outputs", units=units, ranks=ranks)
        self.proj = Linear(hidden_size, hidden_size, split="inputs", ranks=ranks)

    def pair(self) -> None:
        """Put the loaded channels i and i + D / 2, which are rotated together, next to each other.

        The order of queries and keys stays equal, so their products do not change.
        """
        self.qkv.make_plain()
        for parameter in self.qkv.parameters():
            queries_and_keys, values = parameter.data.tensor_split((2 * parameter.shape[0] // 3,))
            halves = queries_and_keys.unflatten(0, (2 * self.num_heads, 2, -1))
            parameter.data = torch.cat((halves.transpose(1, 2).flatten(0, 2), values))

    def add_to(
        self,
        residual_PE: torch.Tensor,
        x_PE: torch.Tensor,
        cos_sin_P1C: torch.Tensor,
        layout: PackedLayout,
        backend: VisionAttentionBackend,
    ) -> torch.Tensor:
        """Attend over *x_PE*, and return the residual plus the result. *cos_sin_P1C* goes to `ops.rotary_pairs`."""
        qkv_PHD = self.qkv(x_PE).view(x_PE.shape[0], 3 * self.num_heads, -1)
        qk_PHD = self.ops.rotary_pairs(qkv_PHD[:, : 2 * self.num_heads], cos_sin_P1C)
        q_PQD, k_PQD = qk_PHD.chunk(2, dim=1)
        v_PQD = qkv_PHD[:, -self.num_heads :]
        return self.proj.add_to(residual_PE, backend.packed(q_PQD, k_PQD, v_PQD, layout))

"""Shared parts of vision towers: patch geometry on the host, the patch embedding, packed bidirectional attention.

Grids are (frames, rows, columns) in patches, on the CPU. Patches come in merge-block order: for each frame, (rows / m,
columns / m, m, m). Shapes: P patches, Q heads, D head size, E hidden size.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from saccade.nn.context import PackedLayout, VisionAttentionBackend, check_metadata
from saccade.nn.layers import Layer, Linear
from saccade.nn.parallel import ALONE, Ranks
from saccade.nn.transfer import to_device

Grid = tuple[int, int, int]

IN_THE_ENCODER = "heads in its vision encoder (`--mm-encoder-tp-mode data` does not cut it)"
"""The shared unit, in errors."""

KEYS_A = np.float32(-0.75)
"""The free number of the bicubic kernel (Keys 1981, IEEE TASSP 29) in PyTorch's interpolation."""


Taps = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]
"""Entries of a table of learned positions for each patch, and their weights in the patch's position."""

TapRule = Callable[[npt.NDArray[np.int64], int, int], Taps]
"""Maps the places [P] of patches along a side of *size* patches to entries [P, T] of a side of *side* entries."""


def grid_list(grids: Iterable[Sequence[int] | torch.Tensor]) -> list[Grid]:
    """Return grids as host integers, from triples or from the rows of a CPU tensor [n, 3]."""
    return [(int(frames), int(height), int(width)) for frames, height, width in grids]


def patch_coordinates(grid: Grid, merge: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the row and the column of every patch of one frame, in merge-block order, each [rows * columns]."""
    _, height, width = grid
    row, column = np.mgrid[0:height, 0:width].reshape(2, height // merge, merge, width // merge, merge).swapaxes(2, 3)
    return row.ravel(), column.ravel()


def aligned_taps(position: npt.NDArray[np.int64], size: int, side: int) -> Taps:
    """Return the two entries [P, 2] and their weights that resample *side* entries to *size*, with aligned corners.

    Formula: transformers, vision_utils.py, get_vision_interpolation_indices_and_weights.
    """
    place = position.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    low = place.astype(np.int64)
    high = np.minimum(low + 1, side - 1)
    share = (place - low).astype(np.float32)
    return np.stack((low, high), 1), np.stack((1 - share, share), 1)


def centred_taps(position: npt.NDArray[np.int64], size: int, side: int) -> Taps:
    """Return the same as aligned_taps, but with aligned outer edges. Beyond the table, its border entries repeat."""
    place = _centres(position, size, side)
    low = np.floor(place)
    share = (place - low).astype(np.float32)
    entries = low.astype(np.int64)[:, None] + np.arange(2)
    return entries.clip(0, side - 1), np.stack((1 - share, share), 1)


def bicubic_taps(position: npt.NDArray[np.int64], size: int, side: int) -> Taps:
    """Return the four entries [P, 4] and their weights that resample *side* entries to *size*.

    The rule is that of functional.interpolate in bicubic mode, without aligned corners or antialiasing. Beyond the
    table, its border entries repeat. If *size* is *side*, the weights are exactly 0, 1, 0, 0.
    """
    place = _centres(position, size, side)
    low = np.floor(place)
    entries = low.astype(np.int64)[:, None] + np.arange(-1, 3)
    distance = np.abs(place[:, None] - entries.astype(np.float32))
    near = ((KEYS_A + 2) * distance - (KEYS_A + 3)) * distance * distance + 1
    far = ((KEYS_A * distance - 5 * KEYS_A) * distance + 8 * KEYS_A) * distance - 4 * KEYS_A
    return entries.clip(0, side - 1), np.where(distance <= 1, near, far).astype(np.float32)


def _centres(position: npt.NDArray[np.int64], size: int, side: int) -> npt.NDArray[np.float32]:
    """Return where the centres of patches lie among the entries of a table."""
    return (position.astype(np.float32) + np.float32(0.5)) * np.float32(side) / np.float32(size) - np.float32(0.5)


@lru_cache(maxsize=32)
def frame_coordinates(grid: Grid, merge: int) -> npt.NDArray[np.float32]:
    """Return row and column [rows * columns, 2] of the patches of one frame, in merge-block order.

    Do not write to the array: it is cached, because successive images often have the same size.
    """
    return np.stack(patch_coordinates(grid, merge), 1).astype(np.float32)


@lru_cache(maxsize=32)
def table_taps(grid: Grid, merge: int, table: tuple[int, int], rule: TapRule) -> Taps:
    """Return the entries, and their weights, of a *table* of rows x columns for one frame's patches.

    The patches are in merge-block order. Do not write to the arrays: they are cached.
    """
    row, column = patch_coordinates(grid, merge)
    rows, row_weights = rule(row, grid[1], table[0])
    columns, column_weights = rule(column, grid[2], table[1])
    entries = rows[:, :, None] * table[1] + columns[:, None, :]
    weights = row_weights[:, :, None] * column_weights[:, None, :]
    return entries.reshape(len(row), -1), weights.reshape(len(row), -1)


def packed_layout(grids: Sequence[Grid], device: torch.device, backend: VisionAttentionBackend) -> PackedLayout:
    """Return the attention layout of concatenated images: each frame attends only to itself."""
    lengths = tuple(height * width for frames, height, width in grids for _ in range(frames))
    return packed_sequences(lengths, device, backend)


def packed_sequences(lengths: tuple[int, ...], device: torch.device, backend: VisionAttentionBackend) -> PackedLayout:
    """Return the attention layout of concatenated sequences, copied to *device* without a sync.

    Raises ValueError for a layout that lacks what *backend* reads. This check runs before the launch, once for all
    blocks.
    """
    borders = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=borders[1:])
    layout = PackedLayout(to_device(borders, device), max(lengths), lengths)
    check_metadata(backend, layout)
    return layout


class PatchEmbedding(nn.Module):
    """Patch embedding as a matrix product: a convolution whose stride equals its kernel size.

    Some checkpoints' kernels span two frames. An image shows the same frame twice, so the kernel summed over time gives
    the same result with half the multiplications. Patches of videos have both frames, and use the whole kernel.
    """

    def __init__(self, hidden_size: int, kernel: tuple[int, ...], bias: bool = True) -> None:
        """*kernel* is (channels, height, width) or (channels, frames, height, width)."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, *kernel), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(hidden_size), requires_grad=False) if bias else None
        self.folded: Linear | None = None
        self.whole: Linear | None = None

    def finish(self) -> None:
        """Make the matrices from the loaded kernel. Patches of one frame use its sum over time, computed in float32."""
        kernel = self.weight.float().sum(2).to(self.weight.dtype) if self.weight.ndim == 5 else self.weight
        self.folded = self._linear(kernel.flatten(1))
        self.whole = self._linear(self.weight.flatten(1)) if self.weight.ndim == 5 else None

    def forward(self, patches_PC: torch.Tensor) -> torch.Tensor:
        """Map normalised patches [P, channels * (frames *) height * width] to [P, E]. Call `finish` first."""
        if self.whole is not None and patches_PC.shape[1] == self.whole.weight.shape[1]:
            return self.whole(patches_PC)  # type: ignore[no-any-return]
        return self.folded(patches_PC)  # type: ignore[no-any-return,misc]

    def _linear(self, kernel_EC: torch.Tensor) -> Linear:
        linear = Linear(kernel_EC.shape[1], kernel_EC.shape[0], bias=False)
        linear.weight, linear.bias = nn.Parameter(kernel_EC, requires_grad=False), self.bias
        return linear


class PackedSelfAttention(Layer):
    """Bidirectional attention within each packed sequence, with rotary positions; the heads are cut over *ranks*.

    Channels that are rotated together are neighbours. *qkv_bias* and *bias* say whether the two matrices have biases.
    """

    def __init__(
        self, hidden_size: int, num_heads: int, ranks: Ranks = ALONE, *, qkv_bias: bool = True, bias: bool = True
    ) -> None:
        super().__init__()
        self.num_heads = ranks.divide(num_heads, IN_THE_ENCODER)
        self.head_dim = hidden_size // num_heads
        widths, units = (hidden_size,) * 3, (num_heads,) * 3
        self.qkv = Linear(hidden_size, widths, qkv_bias, split="outputs", units=units, ranks=ranks)
        self.proj = Linear(hidden_size, hidden_size, bias, split="inputs", ranks=ranks)

    def normed(self, qk_PHD: torch.Tensor) -> torch.Tensor:
        """Return the queries and keys that will be rotated; some towers normalise them here."""
        return qk_PHD

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
        qk_PHD = self.ops.rotary_pairs(self.normed(qkv_PHD[:, : 2 * self.num_heads]), cos_sin_P1C)
        q_PQD, k_PQD = qk_PHD.chunk(2, dim=1)
        v_PQD = qkv_PHD[:, -self.num_heads :]
        return self.proj.add_to(residual_PE, backend.packed((q_PQD, k_PQD, v_PQD), layout))


class PairedSelfAttention(PackedSelfAttention):
    """PackedSelfAttention for checkpoints in which the channels i and i + D / 2 are rotated together."""

    def finish(self) -> None:
        """Put channels i and i + D / 2 next to each other.

        Queries and keys are reordered alike, so their products do not change.
        """
        num_rows = sum(self.qkv.partitions)
        queries_and_keys, values = torch.arange(num_rows).tensor_split((2 * num_rows // 3,))
        halves = queries_and_keys.unflatten(0, (2 * self.num_heads, 2, -1))
        self.qkv.reorder_rows(torch.cat((halves.transpose(1, 2).flatten(), values)))

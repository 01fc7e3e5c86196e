"""MoonViT, a tower for images of any size and clips of a few frames, and its projector.

Every image attends to itself, with learned positions that are resampled to its grid and 2-D rotary positions. The
frames of a clip attend to each other, have positions in time as well, and are averaged to one; a video is cut into
clips of `clip_frames`, of which the last may be shorter. Patches come in raster order, frame after frame, and are put
into merge-block order at once, while they are bytes.

Formulas: transformers, modeling_kimi_k25.py (vision tower) and vision_utils.py. Encoder contract: `prepare` does all
that depends on grids, on the host; `encode` then runs without a device sync. Shapes: P patches, I values of a patch,
E hidden size, D head size, F frames of a clip, U merged patches, X text width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from saccade.models.backbones.moonvit_config import MoonVitConfig
from saccade.models.backbones.vision_mlp import VisionMlp
from saccade.models.preprocessing.processor_config import CHANNELS
from saccade.nn.context import PackedLayout, VisionAttentionBackend, check_metadata
from saccade.nn.layers import LayerNorm, Linear
from saccade.nn.ops import GELU
from saccade.nn.parallel import ALONE, Ranks
from saccade.nn.rope import cos_sin_pairs, inverse_frequencies
from saccade.nn.transfer import to_device
from saccade.nn.vision import Grid, PackedSelfAttention, PatchEmbedding, packed_sequences, patch_coordinates

NORM_EPS = 1e-5
ROPE_THETA = 10000.0
KEYS_A = np.float32(-0.75)
"""The free number of the bicubic kernel (Keys 1981, IEEE TASSP 29) in PyTorch's interpolation."""


@dataclass(frozen=True, slots=True)
class ClipMetadata:
    """Additional metadata of clips with several frames. M is the number of patches after averaging the frames.

    *times* int64 [P] are rows of the table of times, 0 in clips of one frame. *frames* int64 [M, F] are the patches
    whose weighted sum is one patch, with the weights *shares* [M, F, 1]; a clip with fewer frames has weights of 0.
    """

    times: torch.Tensor
    frames: torch.Tensor
    shares: torch.Tensor


@dataclass(frozen=True, slots=True)
class MoonVitMetadata:
    """The metadata that depends only on grids: `prepare` computes it, and every block reads it.

    *order* int64 [P] is the place in the raster of each patch in merge-block order. *taps* int64 [P, 16] and
    *tap_weights* [P, 16] resample the learned positions; *cos_sin* complex64 [P, 1, D / 2] is the argument of
    `ops.rotary_pairs`. *clips* is None if all clips have one frame. Raises ValueError for a layout without the
    backend's metadata.
    """

    layout: PackedLayout
    order: torch.Tensor
    taps: torch.Tensor
    tap_weights: torch.Tensor
    cos_sin: torch.Tensor
    backend: VisionAttentionBackend
    clips: ClipMetadata | None = None

    def __post_init__(self) -> None:
        """Check the host's values, once a call."""
        check_metadata(self.backend, self.layout)


class Places(NamedTuple):
    """The places of one frame's patches, in merge-block order.

    *places* float32 [P, 2] are column and row; the other fields are those of MoonVitMetadata for this frame.
    """

    order: npt.NDArray[np.int64]
    places: npt.NDArray[np.float32]
    taps: npt.NDArray[np.int64]
    tap_weights: npt.NDArray[np.float32]


def frame_places(grid: Grid, merge: int, table: tuple[int, int]) -> Places:
    """Return the places of one frame, for a *table* of (rows, columns)."""
    row, column = patch_coordinates(grid, merge)
    rows, row_weights = bicubic_taps(row, grid[1], table[0])
    columns, column_weights = bicubic_taps(column, grid[2], table[1])
    taps = rows[:, :, None] * table[1] + columns[:, None, :]
    weights = row_weights[:, :, None] * column_weights[:, None, :]
    places = np.stack((column, row), 1).astype(np.float32)
    return Places(row * grid[2] + column, places, taps.reshape(-1, 16), weights.reshape(-1, 16))


def clips_of(grid: Grid, most: int) -> list[Grid]:
    """Return the grids of the clips of a video or image, each of *most* frames but the last."""
    frames, rows, columns = grid
    return [(min(most, frames - first), rows, columns) for first in range(0, frames, most)]


def clip_metadata(clips: Sequence[Grid], device: torch.device) -> ClipMetadata | None:
    """Return the metadata of *clips* with several frames; None if there are none."""
    most = max(frames for frames, _, _ in clips)
    if most == 1:
        return None
    times, gathered, shares = [], [], []
    start = 0
    for frames, rows, columns in clips:
        size = rows * columns
        times.append(np.repeat(np.arange(frames) + (frames > 1), size))
        offsets = np.where(np.arange(most) < frames, np.arange(most) * size, 0)
        gathered.append(start + np.arange(size)[:, None] + offsets)
        shares.append(np.tile(np.where(np.arange(most) < frames, 1 / frames, 0), (size, 1)))
        start += frames * size
    host = (np.concatenate(times), np.concatenate(gathered), np.concatenate(shares).astype(np.float32)[:, :, None])
    return ClipMetadata(*(to_device(array, device) for array in host))


def times_table(num_times: int, width: int) -> torch.Tensor:
    """Return a row of zeros, then the positions in time, [1 + num_times, E]: half of a row sines, half cosines."""
    frequencies = 1.0 / (ROPE_THETA ** (torch.arange(0, width, 2).float() / width))
    angles = torch.outer(torch.arange(num_times).float(), frequencies)
    return torch.cat((torch.zeros(1, width), torch.cat((angles.sin(), angles.cos()), 1)))


def bicubic_taps(
    position: npt.NDArray[np.int64], size: int, side: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Return the four table entries [P, 4] and their weights that resample *side* entries to *size*.

    The rule is that of functional.interpolate with bicubic, without aligned corners and antialiasing. Entries outside
    of the table are those at its border. If *size* is *side*, the weights are exactly 0, 1, 0, 0.
    """
    place = (position.astype(np.float32) + np.float32(0.5)) * np.float32(side) / np.float32(size) - np.float32(0.5)
    low = np.floor(place)
    entries = low.astype(np.int64)[:, None] + np.arange(-1, 3)
    distance = np.abs(place[:, None] - entries.astype(np.float32))
    near = ((KEYS_A + 2) * distance - (KEYS_A + 3)) * distance * distance + 1
    far = ((KEYS_A * distance - 5 * KEYS_A) * distance + 8 * KEYS_A) * distance - 4 * KEYS_A
    return entries.clip(0, side - 1), np.where(distance <= 1, near, far).astype(np.float32)


def mean_of_frames(x_PE: torch.Tensor, clips: ClipMetadata) -> torch.Tensor:
    """Return the mean [M, E] over the frames of each clip, computed in float32."""
    frames_MFE = x_PE.index_select(0, clips.frames.flatten()).view(*clips.frames.shape, -1)
    return (frames_MFE.float() * clips.shares).sum(1).to(x_PE.dtype)


class MoonVitMlp(VisionMlp):
    """Has the names of the releases."""

    names = ("fc0", "fc1")


class MoonVitBlock(nn.Module):
    """Attention, then the MLP; each reads a normalised input, and its result is added to the residual.

    Checkpoints store the channels that are rotated together next to each other, as `ops.rotary_pairs` takes them.
    """

    def __init__(self, config: MoonVitConfig, ranks: Ranks) -> None:
        super().__init__()
        self.norm0 = LayerNorm(config.hidden_size, NORM_EPS)
        self.attn = PackedSelfAttention(config.hidden_size, config.num_heads, ranks)
        self.norm1 = LayerNorm(config.hidden_size, NORM_EPS)
        self.mlp = MoonVitMlp(config, ranks)

    def forward(self, x_PE: torch.Tensor, metadata: MoonVitMetadata) -> torch.Tensor:
        """Map [P, E] to [P, E]."""
        x_PE = self.attn.add_to(x_PE, self.norm0(x_PE), metadata.cos_sin, metadata.layout, metadata.backend)
        return self.mlp.add_to(x_PE, self.norm1(x_PE))


class MoonVitProjector(nn.Module):
    """Normalise patches, concatenate each merge block, and project it into the text network's space."""

    def __init__(self, config: MoonVitConfig) -> None:
        super().__init__()
        self.width = config.hidden_size * config.merge_size**2
        self.pre_norm = LayerNorm(config.hidden_size, config.projector_eps)
        self.linear_fc1 = Linear(self.width, self.width)
        self.linear_fc2 = Linear(self.width, config.out_hidden_size)

    def forward(self, x_PE: torch.Tensor) -> torch.Tensor:
        """Map [P, E] to [U, X]."""
        merged = self.pre_norm(x_PE).view(-1, self.width)
        return self.linear_fc2(self.linear_fc1(merged, GELU))  # type: ignore[no-any-return]


class MoonVitTower(nn.Module):
    """Maps patches in merge-block order to normalised vectors, as many for a clip as for one of its frames."""

    def __init__(self, config: MoonVitConfig, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.config = config
        kernel = (CHANNELS, config.patch_size, config.patch_size)
        self.patch_embed = nn.ModuleDict({"proj": PatchEmbedding(config.hidden_size, kernel), "pos_emb": nn.Module()})
        table = torch.empty(config.table_rows, config.table_columns, config.hidden_size)
        self.patch_embed["pos_emb"].weight = nn.Parameter(table, requires_grad=False)
        self.blocks = nn.ModuleList(MoonVitBlock(config, ranks) for _ in range(config.depth))
        self.final_layernorm = LayerNorm(config.hidden_size, NORM_EPS)
        self.table_TE = torch.empty(0)
        self.times_FE = torch.empty(0)

    def finish(self) -> None:
        """Compute the values derived from the loaded weights."""
        self.patch_embed["proj"].fold()  # type: ignore[operator]
        # Resampling computes weighted sums of sixteen entries in float32.
        self.table_TE = self.patch_embed["pos_emb"].weight.data.float().flatten(0, 1)  # type: ignore[operator]
        self.times_FE = times_table(self.config.clip_frames, self.config.hidden_size).to(self.table_TE.device)

    def prepare(self, grids: Sequence[Grid], backend: VisionAttentionBackend) -> MoonVitMetadata:
        """Return the metadata of *grids*, computed on the host and copied without a device sync."""
        device, config = self.table_TE.device, self.config
        table = config.table_rows, config.table_columns
        clips = [clip for grid in grids for clip in clips_of(grid, config.clip_frames)]
        frames: list[Places] = []
        for grid in grids:
            frames += [frame_places(grid, config.merge_size, table)] * grid[0]
        starts = np.cumsum([0, *(len(frame.order) for frame in frames)])
        order = np.concatenate([start + frame.order for start, frame in zip(starts, frames, strict=False)])
        _, *rest = (np.concatenate(arrays) for arrays in zip(*frames, strict=True))
        order_P, place_P2, taps_P, weights_P = (to_device(array, device) for array in (order, *rest))
        frequencies = inverse_frequencies(ROPE_THETA, config.hidden_size // config.num_heads // 2, device)
        # Pairs of channels rotate by the column and by the row, alternately.
        angles = (place_P2.unsqueeze(1) * frequencies.unsqueeze(1)).flatten(1)
        layout = packed_sequences(tuple(map(prod, clips)), device)
        of_clips = clip_metadata(clips, device)
        return MoonVitMetadata(layout, order_P, taps_P, weights_P, cos_sin_pairs(angles), backend, of_clips)

    def forward(self, patches_PI: torch.Tensor, metadata: MoonVitMetadata) -> torch.Tensor:
        """Map normalised patches [P, I], in merge-block order, to [P, E], or with clips of several frames to [M, E]."""
        learned_PE = functional.embedding_bag(
            metadata.taps, self.table_TE, per_sample_weights=metadata.tap_weights, mode="sum"
        )
        if metadata.clips is not None:
            learned_PE = learned_PE + self.times_FE.index_select(0, metadata.clips.times)
        x_PE = self.patch_embed["proj"](patches_PI)
        x_PE = x_PE + learned_PE.to(x_PE.dtype)
        for block in self.blocks:
            x_PE = block(x_PE, metadata)
        x_PE = self.final_layernorm(x_PE)
        return x_PE if metadata.clips is None else mean_of_frames(x_PE, metadata.clips)

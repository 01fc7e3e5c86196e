"""MoonViT, a vision tower for images of any size and clips of a few frames, and its projector.

Each image attends only to itself, with learned positions, which are resampled to its grid, and 2-D rotary positions. A
clip's frames attend to each other, also have positions in time, and are averaged into one. A video is cut into clips of
`clip_frames` frames; the last may be shorter. Patches arrive in raster order, frame after frame, and are first put into
merge-block order.

Formulas: transformers, modeling_kimi_k25.py (vision tower) and vision_utils.py. Shapes: P patches, C values per patch,
E hidden size, F frames of a clip, U merged patches, X text width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import nn

from saccade.models.backbones.merging_tower import (
    ROPE_THETA,
    BlockMetadata,
    LearnedMetadata,
    LearnedTower,
    PatchMerger,
)
from saccade.models.backbones.moonvit_config import MoonVitConfig
from saccade.nn.context import VisionAttentionBackend
from saccade.nn.layers import LayerNorm
from saccade.nn.layerwise import Layerwise
from saccade.nn.parallel import ALONE, Ranks
from saccade.nn.rope import cos_sin_pairs, inverse_frequencies
from saccade.nn.transfer import to_device
from saccade.nn.vision import (
    Grid,
    PackedSelfAttention,
    bicubic_taps,
    frame_coordinates,
    packed_sequences,
)


@dataclass(frozen=True, slots=True)
class ClipMetadata:
    """Additional metadata for clips with several frames. M is the number of patches after averaging the frames.

    *times* int64 [P] holds each patch's row in the table of times, 0 in clips of one frame. Each row of *frames* int64
    [M, F] names the patches whose weighted sum becomes one patch. *shares* [M, F, 1] are the weights; clips with fewer
    than F frames have some weights of 0.
    """

    times: torch.Tensor
    frames: torch.Tensor
    shares: torch.Tensor


@dataclass(frozen=True, slots=True)
class MoonVitMetadata(LearnedMetadata):
    """The metadata that depends only on grids. *clips* is None if all clips have one frame.

    *order* int64 [P] lists the patches' raster positions in merge-block order.
    """

    order: torch.Tensor
    clips: ClipMetadata | None


def clips_of(grid: Grid, most: int) -> list[Grid]:
    """Return the grids of a video's or image's clips. Each clip has *most* frames; the last may have fewer."""
    frames, rows, columns = grid
    return [(min(most, frames - first), rows, columns) for first in range(0, frames, most)]


def clip_metadata(clips: Sequence[Grid], device: torch.device) -> ClipMetadata | None:
    """Return the additional metadata of *clips*, or None if each has one frame."""
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
    """Return the table [1 + num_times, E]: a row of zeros, then a row per time, half sines and half cosines."""
    frequencies = 1.0 / (ROPE_THETA ** (torch.arange(0, width, 2).float() / width))
    angles = torch.outer(torch.arange(num_times).float(), frequencies)
    return torch.cat((torch.zeros(1, width), torch.cat((angles.sin(), angles.cos()), 1)))


def mean_of_frames(x_PE: torch.Tensor, clips: ClipMetadata) -> torch.Tensor:
    """Return the mean [M, E] over the frames of each clip, computed in float32."""
    frames_MFE = x_PE.index_select(0, clips.frames.flatten()).view(*clips.frames.shape, -1)
    return (frames_MFE.float() * clips.shares).sum(1).to(x_PE.dtype)


class MoonVitTower(LearnedTower):
    """Maps patches in raster order to features. A clip gets as many features as one of its frames."""

    tap_rule = staticmethod(bicubic_taps)
    config: MoonVitConfig

    def __init__(self, config: MoonVitConfig, ranks: Ranks = ALONE) -> None:
        super().__init__(config, ranks)
        self.pos_embed.weight = nn.Parameter(torch.empty(*self.table, config.hidden_size), requires_grad=False)
        self.final_layernorm = LayerNorm(config.hidden_size, config.norm_eps)
        self.times_FE = torch.empty(0)

    def make_attention(self, ranks: Ranks) -> PackedSelfAttention:
        return PackedSelfAttention(self.config.hidden_size, self.config.num_heads, ranks)

    def make_merger(self, ranks: Ranks) -> PatchMerger:
        """Return the projector, which every rank holds whole."""
        return PatchMerger(self.config, norm_eps=self.config.projector_eps)

    @property
    def table(self) -> tuple[int, int]:
        return self.config.table_rows, self.config.table_columns

    def finish(self) -> None:
        super().finish()
        self.pos_embed.weight.data = self.pos_embed.weight.data.flatten(0, 1)  # type: ignore[operator]
        self.times_FE = times_table(self.config.clip_frames, self.config.hidden_size).to(self.device)

    def prepare(self, grids: Sequence[Grid], backend: VisionAttentionBackend) -> MoonVitMetadata:
        device, config = self.device, self.config
        clips = [clip for grid in grids for clip in clips_of(grid, config.clip_frames)]
        frames = [grid for grid in grids for _ in range(grid[0])]
        starts = np.cumsum([0, *(rows * columns for _, rows, columns in frames)])
        coordinates = [frame_coordinates(frame, config.merge_size) for frame in frames]
        # Raster order is row * columns + column.
        orders = (places @ (columns, 1) for places, (_, _, columns) in zip(coordinates, frames, strict=True))
        order = np.concatenate([start + one.astype(np.int64) for start, one in zip(starts, orders, strict=False)])
        order_P, place_P2 = (to_device(array, device) for array in (order, np.concatenate(coordinates)[:, ::-1]))
        frequencies = inverse_frequencies(ROPE_THETA, config.hidden_size // config.num_heads // 2, device)
        # Pairs of channels rotate by the column and by the row, alternately.
        angles = (place_P2.unsqueeze(1) * frequencies.unsqueeze(1)).flatten(1)
        layout = packed_sequences(tuple(map(prod, clips)), device, backend)
        block = BlockMetadata(layout, cos_sin_pairs(angles), backend)
        return MoonVitMetadata(block, *self.taps(grids), order_P, clip_metadata(clips, device))

    def forward(self, patches_PC: torch.Tensor, metadata: MoonVitMetadata) -> Layerwise:
        """Map normalised patches to features [U, X]."""
        learned_PE = self.learned(metadata)
        if metadata.clips is not None:
            learned_PE = learned_PE + self.times_FE.index_select(0, metadata.clips.times)
        x_PE = self.patch_embed["proj"](patches_PC.index_select(0, metadata.order))
        x_PE = x_PE + learned_PE.to(x_PE.dtype)
        for block in self.blocks:
            x_PE = block(x_PE, metadata.block)
            yield
        x_PE = self.final_layernorm(x_PE)
        return self.merger(x_PE if metadata.clips is None else mean_of_frames(x_PE, metadata.clips))  # type: ignore[no-any-return]

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

import numpy as np
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
from saccade.nn.vision import (
    Grid,
    PackedSelfAttention,
    PatchEmbedding,
    bicubic_taps,
    frame_coordinates,
    packed_sequences,
    table_taps,
)

NORM_EPS = 1e-5
ROPE_THETA = 10000.0


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
        frames = [grid for grid in grids for _ in range(grid[0])]
        starts = np.cumsum([0, *(rows * columns for _, rows, columns in frames)])
        coordinates = [frame_coordinates(frame, config.merge_size) for frame in frames]
        # Raster order is row * columns + column.
        orders = (places @ (columns, 1) for places, (_, _, columns) in zip(coordinates, frames, strict=True))
        order = np.concatenate([start + one.astype(np.int64) for start, one in zip(starts, orders, strict=False)])
        taps = [table_taps(frame, config.merge_size, table, bicubic_taps) for frame in frames]
        host = (order, np.concatenate(coordinates)[:, ::-1], *map(np.concatenate, zip(*taps, strict=True)))
        order_P, place_P2, taps_P, weights_P = (to_device(array, device) for array in host)
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

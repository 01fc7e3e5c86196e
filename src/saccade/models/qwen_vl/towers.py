"""The vision towers: patches to features in the text network's space.

Formulas: transformers, modeling_qwen2_vl.py, modeling_qwen2_5_vl.py (Qwen2_5_VisionTransformerPretrainedModel) and
modeling_qwen3_vl.py (Qwen3VLVision*). Encoder contract: `prepare` does all that depends on grids, on the host;
`forward` then runs without a device sync. Shapes: P patches, C channels * height * width of a patch, E hidden size,
D head size, U merged patches, X text width, W = X * number of features of a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from saccade.models.backbones.decoder import Norm
from saccade.models.backbones.vision_mlp import VisionMlp
from saccade.models.preprocessing.processor_config import CHANNELS
from saccade.models.qwen_vl.tower_config import Tower3Config, TowerConfig, WindowedConfig
from saccade.models.spec import Grid
from saccade.nn.context import PackedLayout, VisionAttentionBackend, check_metadata
from saccade.nn.layers import Layer, LayerNorm, Linear, RMSNorm
from saccade.nn.ops import ACTIVATIONS, GELU
from saccade.nn.parallel import ALONE, Ranks
from saccade.nn.rope import cos_sin_pairs, inverse_frequencies
from saccade.nn.transfer import to_device
from saccade.nn.vision import (
    FramePlaces,
    PackedSelfAttention,
    PatchEmbedding,
    frame_coordinates,
    frame_places,
    packed_layout,
    packed_sequences,
)

NORM_EPS = 1e-6
ROPE_THETA = 10000.0


@dataclass(frozen=True, slots=True)
class BlockMetadata:
    """A block's metadata: which patches attend to each other, and their rotations.

    *cos_sin* complex64 [P, 1, D / 2] is the argument of `ops.rotary_pairs`. Raises ValueError for a layout without the
    backend's metadata.
    """

    layout: PackedLayout
    cos_sin: torch.Tensor
    backend: VisionAttentionBackend

    def __post_init__(self) -> None:
        """Check the host's values, once a call."""
        check_metadata(self.backend, self.layout)


@dataclass(frozen=True, slots=True)
class LearnedMetadata:
    """The metadata that depends only on grids; `prepare` computes it.

    *taps* int64 [P, 4] and *tap_weights* [P, 4] resample the learned positions; *block* is for every block.
    """

    block: BlockMetadata
    taps: torch.Tensor
    tap_weights: torch.Tensor


@lru_cache(maxsize=32)
def frame_windows(rows: int, columns: int, side: int) -> tuple[npt.NDArray[np.int64], tuple[int, ...]]:
    """Return an order of the merged patches of one frame, window after window, and the windows' sizes.

    Windows have side * side merged patches, less at the right and lower border. Equal windows are neighbours, so that
    they can be attended together; the order of windows changes no result. The array is cached: do not write to it.
    """
    row, column = np.divmod(np.arange(rows * columns), columns)
    window = row // side * -(-columns // side) + column // side
    sizes = np.bincount(window)
    order = np.lexsort((window, -sizes[window]))
    return order, tuple(sorted(sizes.tolist(), reverse=True))


@dataclass(frozen=True, slots=True)
class WindowedMetadata:
    """The metadata that depends only on grids. Blocks that attend within windows read *windows*, the others *frames*.

    *order* int64 [U] puts merged patches into the order of windows, *restored* int64 [U] puts them back.
    """

    windows: BlockMetadata
    frames: BlockMetadata
    order: torch.Tensor
    restored: torch.Tensor


def axial_cos_sin(places_P2: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return the rotations [P, 1, D / 2] of patches at (row, column): half of the angles by row, half by column."""
    frequencies = inverse_frequencies(ROPE_THETA, head_dim // 2, places_P2.device)
    return cos_sin_pairs((places_P2.unsqueeze(-1) * frequencies).flatten(1))


class QwenMlp(VisionMlp):
    """Has the names of Qwen3-VL; those of Qwen2-VL are renamed."""

    names = ("linear_fc1", "linear_fc2")


class VisionBlock(nn.Module):
    """Attention, then *mlp*; each reads a normalised input, and its result is added to the residual."""

    def __init__(self, config: TowerConfig, mlp: nn.Module, norm: Norm, ranks: Ranks) -> None:
        super().__init__()
        self.norm1 = norm(config.hidden_size, NORM_EPS)
        self.attn = PackedSelfAttention(config.hidden_size, config.num_heads, ranks)
        self.norm2 = norm(config.hidden_size, NORM_EPS)
        self.mlp = mlp

    def forward(self, x_PE: torch.Tensor, metadata: BlockMetadata) -> torch.Tensor:
        """Map [P, E] to [P, E]."""
        x_PE = self.attn.add_to(x_PE, self.norm1(x_PE), metadata.cos_sin, metadata.layout, metadata.backend)
        return self.mlp.add_to(x_PE, self.norm2(x_PE))  # type: ignore[operator,no-any-return]


class PatchMerger(nn.Module):
    """Concatenate each merge block and project it. The norm comes before the concatenation, or after it."""

    def __init__(
        self, config: TowerConfig, ranks: Ranks = ALONE, *, norm_merged: bool = False, norm: Norm = LayerNorm
    ) -> None:
        super().__init__()
        self.width = config.hidden_size * config.merge_size**2
        self.norm_merged = norm_merged
        self.norm = norm(self.width if norm_merged else config.hidden_size, NORM_EPS)
        self.linear_fc1 = Linear(self.width, self.width, split="outputs", ranks=ranks)
        self.linear_fc2 = Linear(self.width, config.out_hidden_size, split="inputs", ranks=ranks)

    def forward(self, x_PE: torch.Tensor) -> torch.Tensor:
        """Map [P, E] to [U, X]."""
        x = x_PE.view(-1, self.width) if self.norm_merged else x_PE
        merged = self.norm(x).view(-1, self.width)
        return self.linear_fc2(self.linear_fc1(merged, GELU))  # type: ignore[no-any-return]


class VisionGatedMlp(Layer):
    """down(activation(gate(x)) * up(x)), with biases."""

    def __init__(self, config: WindowedConfig, ranks: Ranks) -> None:
        super().__init__()
        width = config.intermediate_size
        self.gate_up_proj = Linear(config.hidden_size, (width, width), split="outputs", ranks=ranks)
        self.down_proj = Linear(width, config.hidden_size, split="inputs", ranks=ranks)
        self.activation = ACTIVATIONS[config.activation]

    def add_to(self, residual_PE: torch.Tensor, x_PE: torch.Tensor) -> torch.Tensor:
        """Return *residual_PE* plus the MLP of *x_PE*."""
        gated = self.ops.gated_activation(self.gate_up_proj(x_PE), self.activation)
        return self.down_proj.add_to(residual_PE, gated)


class QwenTower(nn.Module):
    """Embedded patches, blocks and a merger. A family's tower names its *norm* and its blocks' *mlp*.

    With *patch_bias*, the embedding of patches has a bias. `prepare` and `forward` are the tower's own.
    """

    norm: Norm = LayerNorm
    mlp: type[nn.Module] = QwenMlp
    patch_bias = False
    config: TowerConfig

    def __init__(self, config: TowerConfig, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.config = config
        kernel = (CHANNELS, config.temporal_patch_size, config.patch_size, config.patch_size)
        self.patch_embed = nn.ModuleDict({"proj": PatchEmbedding(config.hidden_size, kernel, bias=self.patch_bias)})
        self.blocks = nn.ModuleList(
            VisionBlock(config, self.mlp(config, ranks), self.norm, ranks) for _ in range(config.depth)
        )
        self.merger = PatchMerger(config, ranks, norm=self.norm)

    @property
    def device(self) -> torch.device:
        return self.merger.linear_fc1.weight.device

    def finish(self) -> None:
        """Compute the values derived from the loaded weights."""
        self.patch_embed["proj"].fold()  # type: ignore[operator]
        for block in self.blocks:
            block.attn.pair()  # type: ignore[union-attr,operator]

    def prepare(self, grids: Sequence[Grid], backend: VisionAttentionBackend) -> Any:
        """Return the metadata of *grids*, computed on the host and copied without a device sync."""
        raise NotImplementedError


class Tower2(QwenTower):
    """Qwen2-VL's: no learned positions; each frame attends to itself."""

    def prepare(self, grids: Sequence[Grid], backend: VisionAttentionBackend) -> BlockMetadata:
        frames = (frame_coordinates(grid, self.config.merge_size) for grid in grids for _ in range(grid[0]))
        places_P2 = to_device(np.concatenate(list(frames)), self.device)
        return BlockMetadata(packed_layout(grids, self.device), axial_cos_sin(places_P2, self.config.head_dim), backend)

    def forward(self, patches_PC: torch.Tensor, metadata: BlockMetadata) -> torch.Tensor:
        """Map normalised patches to features [U, X]."""
        x_PE = self.patch_embed["proj"](patches_PC)
        for block in self.blocks:
            x_PE = block(x_PE, metadata)
        return self.merger(x_PE)  # type: ignore[no-any-return]


class WindowedTower(QwenTower):
    """Qwen2.5-VL's: most blocks attend within windows."""

    norm, mlp = RMSNorm, VisionGatedMlp
    config: WindowedConfig

    def prepare(self, grids: Sequence[Grid], backend: VisionAttentionBackend) -> WindowedMetadata:
        merge, device = self.config.merge_size, self.device
        orders: list[npt.NDArray[np.int64]] = []
        places: list[npt.NDArray[np.float32]] = []
        sizes: list[int] = []
        start = 0
        for frame in [grid for grid in grids for _ in range(grid[0])]:
            frame_order, frame_sizes = frame_windows(frame[1] // merge, frame[2] // merge, self.config.window)
            orders.append(frame_order + start)
            places.append(frame_coordinates(frame, merge).reshape(len(frame_order), -1)[frame_order])
            sizes += frame_sizes
            start += len(frame_order)
        order_U = np.concatenate(orders)
        host = (np.concatenate(places).reshape(-1, 2), order_U, np.argsort(order_U))
        places_P2, order, restored = (to_device(array, device) for array in host)
        cos_sin = axial_cos_sin(places_P2, self.config.head_dim)
        windows = packed_sequences(tuple(size * merge**2 for size in sizes), device)
        return WindowedMetadata(
            BlockMetadata(windows, cos_sin, backend),
            BlockMetadata(packed_layout(grids, device), cos_sin, backend),
            order,
            restored,
        )

    def forward(self, patches_PC: torch.Tensor, metadata: WindowedMetadata) -> torch.Tensor:
        """Map normalised patches to features [U, X], in the order of patches."""
        x_PE = self.patch_embed["proj"](patches_PC)
        x_PE = x_PE.view(len(metadata.order), -1).index_select(0, metadata.order).view_as(x_PE)
        for index, block in enumerate(self.blocks):
            x_PE = block(x_PE, metadata.frames if index in self.config.full_blocks else metadata.windows)
        return self.merger(x_PE).index_select(0, metadata.restored)  # type: ignore[no-any-return]


class Tower3(QwenTower):
    """Qwen3-VL's: learned positions, resampled to each grid, and features of deepstack blocks."""

    patch_bias = True
    config: Tower3Config

    def __init__(self, config: Tower3Config, ranks: Ranks = ALONE) -> None:
        super().__init__(config, ranks)
        self.pos_embed = nn.Module()
        self.pos_embed.weight = nn.Parameter(torch.empty(config.side**2, config.hidden_size), requires_grad=False)
        self.deepstack_merger_list = nn.ModuleList(
            PatchMerger(config, ranks, norm_merged=True) for _ in config.deepstack_layers
        )

    def finish(self) -> None:
        super().finish()
        # Resampling computes weighted sums of four entries in float32.
        self.pos_embed.weight.data = self.pos_embed.weight.data.float()

    def prepare(self, grids: Sequence[Grid], backend: VisionAttentionBackend) -> LearnedMetadata:
        device, frames = self.device, list[FramePlaces]()
        for grid in grids:
            frames += [frame_places(grid, self.config.merge_size, self.config.side)] * grid[0]
        host = (np.concatenate(arrays) for arrays in zip(*frames, strict=True))
        place_P2, taps_P4, weights_P4 = (to_device(array, device) for array in host)
        cos_sin = axial_cos_sin(place_P2, self.config.head_dim)
        return LearnedMetadata(BlockMetadata(packed_layout(grids, device), cos_sin, backend), taps_P4, weights_P4)

    def forward(self, patches_PC: torch.Tensor, metadata: LearnedMetadata) -> torch.Tensor:
        """Map normalised patches to [U, W]: the main features, then one slice for each deepstack block."""
        learned_PE = functional.embedding_bag(
            metadata.taps,
            self.pos_embed.weight,  # type: ignore[arg-type]
            per_sample_weights=metadata.tap_weights,
            mode="sum",
        )
        x_PE = self.patch_embed["proj"](patches_PC)
        x_PE = x_PE + learned_PE.to(x_PE.dtype)
        tapped: dict[int, torch.Tensor] = {}
        for index, block in enumerate(self.blocks):
            x_PE = block(x_PE, metadata.block)
            if index in self.config.deepstack_layers:
                tapped[index] = x_PE
        taps = (tapped[layer] for layer in self.config.deepstack_layers)
        deep = [merger(tap) for merger, tap in zip(self.deepstack_merger_list, taps, strict=True)]
        return torch.cat([self.merger(x_PE), *deep], dim=-1)

"""Qwen's vision tower with learned, resampled positions and 2-D rotary attention, and the mergers that follow it.

Families with another tower build it from the same blocks. Formulas: transformers, modeling_qwen3_vl.py
(Qwen3VLVision*). Encoder contract: `prepare` does all that depends on
grids, on the host; `forward_blocks` then runs without a device sync; `merge` projects into the text network's space.
Shapes: P patches, C channels * height * width of a patch, E hidden size, D head size, U merged patches, X text width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from saccade.models.backbones.qwen_config import TowerConfig, VisionConfig
from saccade.nn.context import PackedLayout, VisionAttentionBackend, check_metadata
from saccade.nn.layers import LayerNorm, Linear
from saccade.nn.ops import ACTIVATIONS, GELU
from saccade.nn.parallel import ALONE, Ranks
from saccade.nn.rope import cos_sin_pairs, inverse_frequencies
from saccade.nn.transfer import to_device
from saccade.nn.vision import (
    FramePlaces,
    Grid,
    PackedSelfAttention,
    PatchEmbedding,
    frame_places,
    packed_layout,
)

NORM_EPS = 1e-6
ROPE_THETA = 10000.0


Norm = Callable[[int, float], nn.Module]
"""A norm's class; takes the number of channels and the epsilon."""


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
class QwenVisionMetadata:
    """The metadata that depends only on grids; `prepare` computes it.

    *taps* int64 [P, 4] and *tap_weights* [P, 4] resample the learned positions; *block* is for every block.
    """

    block: BlockMetadata
    taps: torch.Tensor
    tap_weights: torch.Tensor


def axial_cos_sin(places_P2: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return the rotations [P, 1, D / 2] of patches at (row, column): half of the angles by row, half by column."""
    frequencies = inverse_frequencies(ROPE_THETA, head_dim // 2, places_P2.device)
    return cos_sin_pairs((places_P2.unsqueeze(-1) * frequencies).flatten(1))


class VisionMlp(nn.Module):
    """Two linear layers with biases, and an activation between them."""

    def __init__(self, config: TowerConfig, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.linear_fc1 = Linear(config.hidden_size, config.intermediate_size, split="outputs", ranks=ranks)
        self.linear_fc2 = Linear(config.intermediate_size, config.hidden_size, split="inputs", ranks=ranks)
        self.activation = ACTIVATIONS[config.activation]

    def add_to(self, residual_PE: torch.Tensor, x_PE: torch.Tensor) -> torch.Tensor:
        """Return *residual_PE* plus the MLP of *x_PE*."""
        return self.linear_fc2.add_to(residual_PE, self.linear_fc1(x_PE, self.activation))


class VisionBlock(nn.Module):
    """Attention, then *mlp*; each reads a normalised input, and its result is added to the residual."""

    def __init__(self, config: TowerConfig, mlp: nn.Module, norm: Norm = LayerNorm, ranks: Ranks = ALONE) -> None:
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


class VisionTower(nn.Module):
    """Maps patches to features in the text network's space."""

    def __init__(self, config: VisionConfig, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.config = config
        kernel = (config.channels, config.temporal_patch_size, config.patch_size, config.patch_size)
        self.patch_embed = nn.ModuleDict({"proj": PatchEmbedding(config.hidden_size, kernel)})
        self.pos_embed = nn.Module()
        self.pos_embed.weight = nn.Parameter(torch.empty(config.side**2, config.hidden_size), requires_grad=False)
        self.blocks = nn.ModuleList(
            VisionBlock(config, VisionMlp(config, ranks), ranks=ranks) for _ in range(config.depth)
        )
        self.merger = PatchMerger(config, ranks)
        self.deepstack_merger_list = nn.ModuleList(
            PatchMerger(config, ranks, norm_merged=True) for _ in config.deepstack_layers
        )

    def finish(self) -> None:
        """Compute the values derived from the loaded weights."""
        self.patch_embed["proj"].fold()  # type: ignore[operator]
        for block in self.blocks:
            block.attn.pair()  # type: ignore[union-attr,operator]
        # Resampling computes weighted sums of four entries in float32.
        self.pos_embed.weight.data = self.pos_embed.weight.data.float()

    def prepare(self, grids: Sequence[Grid], backend: VisionAttentionBackend) -> QwenVisionMetadata:
        """Return the metadata of *grids*, computed on the host and copied without a device sync."""
        device = self.merger.linear_fc1.weight.device
        frames: list[FramePlaces] = []
        for grid in grids:
            frames += [frame_places(grid, self.config.merge_size, self.config.side)] * grid[0]
        host = (np.concatenate(arrays) for arrays in zip(*frames, strict=True))
        place_P2, taps_P4, weights_P4 = (to_device(array, device) for array in host)
        cos_sin = axial_cos_sin(place_P2, self.config.head_dim)
        return QwenVisionMetadata(BlockMetadata(packed_layout(grids, device), cos_sin, backend), taps_P4, weights_P4)

    def forward(self, patches_PC: torch.Tensor, metadata: QwenVisionMetadata) -> torch.Tensor:
        """Map normalised patches [P, C] to features [U, W]."""
        return self.merge(*self.forward_blocks(patches_PC, metadata))

    def forward_blocks(
        self, patches_PC: torch.Tensor, metadata: QwenVisionMetadata
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run the tower over normalised patches; return the last block's output and those of the deepstack blocks."""
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
        return x_PE, [tapped[layer] for layer in self.config.deepstack_layers]

    def merge(self, x_PE: torch.Tensor, tapped: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return [U, X * (1 + deepstack)]: the main features, then one slice per deepstack block."""
        deep = [merger(tap) for merger, tap in zip(self.deepstack_merger_list, tapped, strict=True)]
        return torch.cat([self.merger(x_PE), *deep], dim=-1)

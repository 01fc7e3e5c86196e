"""A vision tower with rotary positions by row and column, which joins each square of patches into one vector.

Formulas: transformers, modeling_qwen2_vl.py (Qwen2VisionTransformerPretrainedModel), modeling_qwen3_vl.py
(Qwen3VLVision*) and modeling_paddleocr_vl.py. Encoder contract: `prepare` does everything that depends on grids, on the
host; `forward` then runs without a device sync. Shapes: P patches, C values per patch, E hidden size, D head size, T
table entries per position, U merged patches, X text width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from saccade.models.backbones.decoder import GatedMlp, Norm
from saccade.models.backbones.vision_config import MergingVisionConfig
from saccade.models.backbones.vision_mlp import VisionMlp
from saccade.nn.context import PackedLayout, VisionAttentionBackend
from saccade.nn.layers import LayerNorm, Linear
from saccade.nn.layerwise import Layerwise
from saccade.nn.ops import ACTIVATIONS, GELU
from saccade.nn.parallel import ALONE, Ranks
from saccade.nn.rope import cos_sin_pairs, inverse_frequencies
from saccade.nn.transfer import to_device
from saccade.nn.vision import (
    Grid,
    PackedSelfAttention,
    PairedSelfAttention,
    PatchEmbedding,
    aligned_taps,
    frame_coordinates,
    packed_layout,
    table_taps,
)

ROPE_THETA = 10000.0


@dataclass(frozen=True, slots=True)
class BlockMetadata:
    """A block's metadata: which patches attend to each other, and their rotations.

    *cos_sin* complex64 [P, 1, D / 2] is the argument of `ops.rotary_pairs`.
    """

    layout: PackedLayout
    cos_sin: torch.Tensor
    backend: VisionAttentionBackend


@dataclass(frozen=True, slots=True)
class LearnedMetadata:
    """The metadata that depends only on grids; `prepare` computes it.

    *taps* int64 [P, T] and *tap_weights* [P, T] resample the learned positions; every block gets *block*.
    """

    block: BlockMetadata
    taps: torch.Tensor
    tap_weights: torch.Tensor


def axial_cos_sin(places_P2: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return the rotations [P, 1, D / 2] of patches at (row, column).

    Half of the angles follow the row, half the column.
    """
    frequencies = inverse_frequencies(ROPE_THETA, head_dim // 2, places_P2.device)
    return cos_sin_pairs((places_P2.unsqueeze(-1) * frequencies).flatten(1))


class TowerMlp(VisionMlp):
    """An MLP with Qwen3-VL's parameter names; other releases' names are mapped to them."""

    names = ("linear_fc1", "linear_fc2")


class GatedTowerMlp(GatedMlp):
    """A gated MLP whose size comes from the tower's configuration."""

    def __init__(self, config: MergingVisionConfig, ranks: Ranks) -> None:
        width, bias = self.shape(config)
        super().__init__(config.hidden_size, width, ranks, bias=bias, activation=ACTIVATIONS[config.activation])

    @staticmethod
    def shape(config: Any) -> tuple[int, bool]:
        """Return the inner width, and whether there are biases."""
        return config.intermediate_size, True


class VisionBlock(nn.Module):
    """*attn*, then *mlp*; each reads a normalised input and adds its result to the residual."""

    def __init__(self, config: MergingVisionConfig, attn: PackedSelfAttention, mlp: nn.Module, norm: Norm) -> None:
        super().__init__()
        self.norm1 = norm(config.hidden_size, config.norm_eps)
        self.attn = attn
        self.norm2 = norm(config.hidden_size, config.norm_eps)
        self.mlp = mlp

    def forward(self, x_PE: torch.Tensor, metadata: BlockMetadata) -> torch.Tensor:
        """Map [P, E] to [P, E]."""
        x_PE = self.attn.add_to(x_PE, self.norm1(x_PE), metadata.cos_sin, metadata.layout, metadata.backend)
        return self.mlp.add_to(x_PE, self.norm2(x_PE))  # type: ignore[operator,no-any-return]


class PatchMerger(nn.Module):
    """Concatenates each merge block's patches and projects the result.

    With *norm_merged*, the norm comes after the concatenation; otherwise it comes before.
    """

    def __init__(
        self,
        config: MergingVisionConfig,
        ranks: Ranks = ALONE,
        *,
        norm_merged: bool = False,
        norm: Norm = LayerNorm,
        norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        self.width = config.hidden_size * config.merge_size**2
        self.norm_merged = norm_merged
        self.norm = norm(self.width if norm_merged else config.hidden_size, norm_eps or config.norm_eps)
        self.linear_fc1 = Linear(self.width, self.width, split="outputs", ranks=ranks)
        self.linear_fc2 = Linear(self.width, config.out_hidden_size, split="inputs", ranks=ranks)

    def forward(self, x_PE: torch.Tensor) -> torch.Tensor:
        """Map [P, E] to [U, X]."""
        x = x_PE.view(-1, self.width) if self.norm_merged else x_PE
        merged = self.norm(x).view(-1, self.width)
        return self.linear_fc2(self.linear_fc1(merged, GELU))  # type: ignore[no-any-return]


class MergingTower(nn.Module):
    """A patch embedding, blocks and a merger. Each frame attends only to itself.

    A family's tower sets its *norm* and its blocks' *mlp*. With *patch_bias*, the patch embedding has a bias.
    """

    norm: Norm = LayerNorm
    mlp: type[nn.Module] = TowerMlp
    patch_bias = False

    def __init__(self, config: Any, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = nn.ModuleDict(
            {"proj": PatchEmbedding(config.hidden_size, config.kernel, bias=self.patch_bias)}
        )
        parts = ((self.make_attention(ranks), self.mlp(config, ranks)) for _ in range(config.depth))
        self.blocks = nn.ModuleList(VisionBlock(config, *own, self.norm) for own in parts)
        self.merger = self.make_merger(ranks)

    def make_attention(self, ranks: Ranks) -> PackedSelfAttention:
        """Return the attention of one block."""
        return PairedSelfAttention(self.config.hidden_size, self.config.num_heads, ranks)

    def make_merger(self, ranks: Ranks) -> nn.Module:
        """Return the module that maps the patches [P, E] of the last block to features."""
        return PatchMerger(self.config, ranks, norm=self.norm)

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.patch_embed["proj"].weight.device  # type: ignore[return-value]

    def prepare(self, grids: Sequence[Grid], backend: VisionAttentionBackend) -> Any:
        """Return the metadata of *grids*, computed on the host and copied without a device sync."""
        return self.frames(grids, backend)

    def frames(self, grids: Sequence[Grid], backend: VisionAttentionBackend) -> BlockMetadata:
        """Return the blocks' metadata, with which each frame attends only to itself."""
        frames = (frame_coordinates(grid, self.config.merge_size) for grid in grids for _ in range(grid[0]))
        places_P2 = to_device(np.concatenate(list(frames)), self.device)
        layout = packed_layout(grids, self.device, backend)
        return BlockMetadata(layout, axial_cos_sin(places_P2, self.config.head_dim), backend)

    def forward(self, patches_PC: torch.Tensor, metadata: Any) -> Layerwise:
        """Map normalised patches to features [U, X]."""
        x_PE = self.patch_embed["proj"](patches_PC)
        for block in self.blocks:
            x_PE = block(x_PE, metadata)
            yield
        return self.merger(x_PE)  # type: ignore[no-any-return]


class LearnedTower(MergingTower):
    """A tower with a table of learned positions, which *tap_rule* resamples to each grid."""

    patch_bias = True
    tap_rule = staticmethod(aligned_taps)

    def __init__(self, config: Any, ranks: Ranks = ALONE) -> None:
        super().__init__(config, ranks)
        self.pos_embed = nn.Module()
        self.pos_embed.weight = nn.Parameter(torch.empty(prod(self.table), config.hidden_size), requires_grad=False)

    @property
    def table(self) -> tuple[int, int]:
        """The numbers of rows and columns in the table."""
        return self.config.side, self.config.side

    def finish(self) -> None:
        """Convert the loaded table to float32, in which resampling sums its weighted entries."""
        self.pos_embed.weight.data = self.pos_embed.weight.data.float()

    def prepare(self, grids: Sequence[Grid], backend: VisionAttentionBackend) -> LearnedMetadata:
        return LearnedMetadata(self.frames(grids, backend), *self.taps(grids))

    def taps(self, grids: Sequence[Grid]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the taps of *grids* and their weights, both [P, T]."""
        merge, rule = self.config.merge_size, self.tap_rule
        frames = [table_taps(grid, merge, self.table, rule) for grid in grids for _ in range(grid[0])]
        taps, weights = (to_device(np.concatenate(arrays), self.device) for arrays in zip(*frames, strict=True))
        return taps, weights

    def embed(self, patches_PC: torch.Tensor, metadata: LearnedMetadata) -> torch.Tensor:
        """Map normalised patches to [P, E], with their learned positions added."""
        return self.placed(self.patch_embed["proj"](patches_PC), metadata)

    def placed(self, x_PE: torch.Tensor, metadata: LearnedMetadata) -> torch.Tensor:
        """Add the learned positions."""
        return x_PE + self.learned(metadata).to(x_PE.dtype)

    def learned(self, metadata: LearnedMetadata) -> torch.Tensor:
        """Return the learned positions, float32 [P, E]."""
        table: torch.Tensor = self.pos_embed.weight  # type: ignore[assignment]
        return functional.embedding_bag(metadata.taps, table, per_sample_weights=metadata.tap_weights, mode="sum")

    def forward(self, patches_PC: torch.Tensor, metadata: Any) -> Layerwise:
        """Map normalised patches to features [U, X]."""
        x_PE = self.embed(patches_PC, metadata)
        for block in self.blocks:
            x_PE = block(x_PE, metadata.block)
            yield
        return self.merger(x_PE)  # type: ignore[no-any-return]

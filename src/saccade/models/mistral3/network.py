"""Pixtral's tower, a merger of patches, and the decoder of Mistral or Ministral 3.

Formulas: transformers 5.23, modeling_pixtral.py and modeling_mistral3.py. Shapes: P patches, C values per patch, E
hidden size, U merged patches, X text width.
"""

from collections.abc import Sequence

import numpy as np
import torch

from saccade.models.backbones.clip_vision import MlpProjector
from saccade.models.backbones.grouped_query_text import GroupedQueryDecoder
from saccade.models.backbones.merging_network import MergingNetwork
from saccade.models.backbones.merging_tower import BlockMetadata, GatedTowerMlp, MergingTower
from saccade.models.backbones.scaled_query_text import ScaledQueryDecoder
from saccade.models.backbones.text_config import TextConfig
from saccade.models.mistral3.layout import Layout
from saccade.models.mistral3.spec import TowerConfig
from saccade.models.mistral3.weights import target
from saccade.nn.context import VisionAttentionBackend
from saccade.nn.layers import Linear, RMSNorm
from saccade.nn.layerwise import Layerwise
from saccade.nn.parallel import ALONE, Ranks
from saccade.nn.rope import cos_sin_pairs, inverse_frequencies
from saccade.nn.transfer import to_device
from saccade.nn.vision import Grid, PackedSelfAttention, PairedSelfAttention, frame_coordinates, packed_layout


class Merger(MlpProjector):
    """A norm, a matrix that joins each square of patches, and the projector."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__(config.hidden_size, config.out_hidden_size, bias=config.projector_bias)
        self.area = config.merge_size**2
        self.norm = RMSNorm(config.hidden_size, config.projector_eps)
        self.merging_layer = Linear(config.hidden_size * self.area, config.hidden_size, bias=False)

    def forward(self, x_PE: torch.Tensor) -> torch.Tensor:
        """Map [P, E] to [U, X]. The matrix reads a square channel by channel, each channel patch by patch."""
        squares = self.norm(x_PE).unflatten(0, (-1, self.area))
        return super().forward(self.merging_layer(squares.transpose(1, 2).flatten(1)))


class TowerMlp(GatedTowerMlp):
    """An MLP without biases."""

    @staticmethod
    def shape(config: TowerConfig) -> tuple[int, bool]:
        return config.intermediate_size, False


class Tower(MergingTower):
    """Pixtral's tower. Embedded patches are normalised; rows and columns have separate rotary frequencies."""

    norm, mlp = RMSNorm, TowerMlp
    config: TowerConfig

    def __init__(self, config: TowerConfig, ranks: Ranks = ALONE) -> None:
        super().__init__(config, ranks)
        self.ln_pre = RMSNorm(config.hidden_size, config.norm_eps)

    def make_attention(self, ranks: Ranks) -> PackedSelfAttention:
        return PairedSelfAttention(self.config.hidden_size, self.config.num_heads, ranks, qkv_bias=False, bias=False)

    def make_merger(self, ranks: Ranks) -> Merger:
        """Return the projector, which every rank holds whole."""
        return Merger(self.config)

    def frames(self, grids: Sequence[Grid], backend: VisionAttentionBackend) -> BlockMetadata:
        frames = [frame_coordinates(grid, self.config.merge_size) for grid in grids]
        places_P2 = to_device(np.concatenate(frames), self.device)
        # Rows take a head's even frequencies, and columns its odd ones.
        frequencies = inverse_frequencies(self.config.rope_theta, self.config.head_dim, self.device).view(-1, 2)
        angles = (places_P2.unsqueeze(2) * frequencies.t()).flatten(1)
        return BlockMetadata(packed_layout(grids, self.device, backend), cos_sin_pairs(angles), backend)

    def forward(self, patches_PC: torch.Tensor, metadata: BlockMetadata) -> Layerwise:
        """Map normalised patches to features [U, X]."""
        x_PE = self.ln_pre(self.patch_embed["proj"](patches_PC))
        for block in self.blocks:
            x_PE = block(x_PE, metadata)
            yield
        return self.merger(x_PE)  # type: ignore[no-any-return]


class Network(MergingNetwork):
    """The family's network in the engine. Parameters are empty until the loader has filled them and called `finish`."""

    layout, tower, target = Layout, Tower, staticmethod(target)

    @staticmethod
    def decoder(text: TextConfig, ranks: Ranks) -> GroupedQueryDecoder:
        """Return the decoder of Mistral, or of Ministral 3."""
        return (GroupedQueryDecoder if text.query_scaling is None else ScaledQueryDecoder)(text, ranks)

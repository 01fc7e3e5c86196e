"""The vision towers, which map patches to features in the text network's space.

Formulas: transformers 5.23, modeling_glm4v.py (Glm4vVision*) and modeling_glm_ocr.py (GlmOcrVision*).
Shapes: P patches, C channels * height * width of a patch, E hidden size, H heads of queries and keys, D head size,
U merged patches, X text width.
"""

from typing import Any

import torch
from torch import nn

from saccade.models.backbones.decoder import GatedMlp
from saccade.models.backbones.merging_tower import GatedTowerMlp, LearnedMetadata, LearnedTower, MergingTower
from saccade.models.glm_v.spec import TowerConfig
from saccade.models.preprocessing.processor_config import CHANNELS
from saccade.nn.layers import LayerNorm, Linear, RMSNorm
from saccade.nn.ops import ACTIVATIONS, GELU
from saccade.nn.parallel import ALONE, Ranks
from saccade.nn.vision import PackedSelfAttention, PairedSelfAttention, PatchEmbedding, bicubic_taps

MERGER_EPS = 1e-5


class Downsample(nn.Module):
    """The tower's last norm, then a convolution that joins each square of patches."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        merge = config.merge_size
        self.area = merge * merge
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.proj = PatchEmbedding(config.out_hidden_size, (config.hidden_size, merge, merge))

    def forward(self, x_PE: torch.Tensor) -> torch.Tensor:
        """Map [P, E] to [U, X]."""
        squares = self.norm(x_PE).unflatten(0, (-1, self.area))
        return self.proj(squares.transpose(1, 2).flatten(1))  # type: ignore[no-any-return]


class Merger(GatedMlp):
    """Downsamples patches, then applies a matrix, a norm, GELU and a gated MLP of *width* channels."""

    def __init__(self, config: TowerConfig, width: int, ranks: Ranks) -> None:
        hidden = config.out_hidden_size
        super().__init__(hidden, width, ranks, activation=ACTIVATIONS[config.activation])
        self.downsample = Downsample(config)
        self.proj = Linear(hidden, hidden, bias=False)
        self.post_projection_norm = LayerNorm(hidden, MERGER_EPS)

    def forward(self, x_PE: torch.Tensor) -> torch.Tensor:
        """Map [P, E] to [U, X]."""
        return super().forward(GELU(self.post_projection_norm(self.proj(self.downsample(x_PE)))))


class TowerMlp(GatedTowerMlp):
    """An MLP as wide as the text network, without biases."""

    @staticmethod
    def shape(config: Any) -> tuple[int, bool]:
        return config.out_hidden_size, False


class Tower(LearnedTower):
    """The tower of GLM-4.xV. Embedded patches are normalised before their positions are added."""

    norm, mlp = RMSNorm, TowerMlp
    tap_rule = staticmethod(bicubic_taps)
    config: TowerConfig

    def __init__(self, config: TowerConfig, ranks: Ranks = ALONE) -> None:
        super().__init__(config, ranks)
        self.post_conv_layernorm = RMSNorm(config.hidden_size, config.norm_eps)

    def make_attention(self, ranks: Ranks) -> PackedSelfAttention:
        config = self.config
        return PairedSelfAttention(
            config.hidden_size, config.num_heads, ranks, qkv_bias=config.attention_bias, bias=False
        )

    def make_merger(self, ranks: Ranks) -> Merger:
        return Merger(self.config, self.config.intermediate_size, ranks)

    def embed(self, patches_PC: torch.Tensor, metadata: LearnedMetadata) -> torch.Tensor:
        return self.placed(self.post_conv_layernorm(self.patch_embed["proj"](patches_PC)), metadata)


class NormedAttention(PairedSelfAttention):
    """Attention with a norm for each head's queries and keys."""

    def __init__(self, config: TowerConfig, ranks: Ranks) -> None:
        bias = config.attention_bias
        super().__init__(config.hidden_size, config.num_heads, ranks, qkv_bias=bias, bias=bias)
        self.q_norm = RMSNorm(self.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.norm_eps)

    def finish(self) -> None:
        super().finish()
        for norm in (self.q_norm, self.k_norm):
            norm.weight.data = norm.weight.data.unflatten(0, (2, -1)).t().flatten()

    def normed(self, qk_PHD: torch.Tensor) -> torch.Tensor:
        q_PHD, k_PHD = qk_PHD.chunk(2, dim=1)
        return torch.cat((self.q_norm(q_PHD), self.k_norm(k_PHD)), 1)


class OcrMlp(GatedTowerMlp):
    """An MLP that has biases if the attention has them."""

    @staticmethod
    def shape(config: Any) -> tuple[int, bool]:
        return config.intermediate_size, config.attention_bias


class OcrTower(MergingTower):
    """The tower of GLM-OCR, without learned positions, and with norms for queries and keys."""

    norm, mlp, patch_bias = RMSNorm, OcrMlp, True
    config: TowerConfig

    def make_attention(self, ranks: Ranks) -> PackedSelfAttention:
        return NormedAttention(self.config, ranks)

    def make_merger(self, ranks: Ranks) -> Merger:
        return Merger(self.config, self.config.out_hidden_size * CHANNELS, ranks)

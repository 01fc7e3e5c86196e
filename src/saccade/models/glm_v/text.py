"""GLM-4's decoders, dense and with experts.

Formulas: transformers 5.23, modeling_glm4v.py (Glm4vText*) and modeling_glm4v_moe.py (Glm4vMoeText*). Shapes: N tokens,
E hidden size, H heads of queries and keys, D head size, C channel pairs.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from saccade.models.backbones.decoder import DecoderLayer, GatedMlp, TextDecoder
from saccade.models.backbones.deepseek_text import routed_mlp
from saccade.models.backbones.grouped_query_text import GroupedQueryAttention
from saccade.models.glm_v.spec import GlmTextConfig
from saccade.nn.context import ForwardContext
from saccade.nn.layers import RMSNorm
from saccade.nn.parallel import ALONE, Ranks
from saccade.nn.rope import cos_sin_pairs


class NeighbourAttention(GroupedQueryAttention):
    """Attention that rotates pairs of neighbouring channels. The channels after the rotated ones do not change."""

    def attend(self, x_NE: torch.Tensor, rotation: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Return the attended values; *rotation* holds complex numbers [N, 1, C]."""
        num_heads, num_kv_heads = self.attention.num_heads, self.attention.num_kv_heads
        qkv_NHD = self.qkv_proj(x_NE).view(x_NE.shape[0], -1, self.head_dim)
        qk_NHD, v_NKD = qkv_NHD.split_with_sizes((num_heads + num_kv_heads, num_kv_heads), dim=1)
        width = 2 * rotation.shape[-1]
        qk_NHD = torch.cat((self.ops.rotary_pairs(qk_NHD[..., :width], rotation), qk_NHD[..., width:]), -1)
        q_NQD, k_NKD = qk_NHD.split_with_sizes((num_heads, num_kv_heads), dim=1)
        return self.attention(q_NQD, k_NKD, v_NKD, context)


class SandwichLayer(nn.Module):
    """Attention, then the MLP. Each has a norm before and after it, and its result is added to the residual."""

    def __init__(self, config: GlmTextConfig, layer: int, ranks: Ranks) -> None:
        super().__init__()
        norm = partial(RMSNorm, config.hidden_size, config.norm_eps)
        self.input_layernorm, self.post_self_attn_layernorm = norm(), norm()
        self.post_attention_layernorm, self.post_mlp_layernorm = norm(), norm()
        self.self_attn = NeighbourAttention(config, layer, ranks.attention)
        self.mlp = GatedMlp(config.hidden_size, config.intermediate_size, ranks)

    def forward(self, x_NE: torch.Tensor, rotation: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Map [N, E] to [N, E]."""
        attended = self.self_attn.attend(self.input_layernorm(x_NE), rotation, context)
        x_NE = x_NE + self.post_self_attn_layernorm(self.self_attn.o_proj(attended))
        return x_NE + self.post_mlp_layernorm(self.mlp(self.post_attention_layernorm(x_NE)))  # type: ignore[no-any-return]


class GlmDecoder(TextDecoder):
    """Maps embeddings to hidden states."""

    config: GlmTextConfig

    def __init__(self, config: GlmTextConfig, ranks: Ranks = ALONE) -> None:
        super().__init__(config, ranks, (_layer(config, layer, ranks) for layer in range(config.num_layers)))

    def rotation(self, angles: torch.Tensor, dtype: torch.dtype) -> Any:
        """Return the layers' rotation.

        With experts, it pairs the two halves of the rotated channels; without them, neighbouring channels.
        """
        if self.config.routed is not None:
            return super().rotation(angles, dtype)
        return cos_sin_pairs(angles) * self.config.rope.magnitude


def _layer(config: GlmTextConfig, layer: int, ranks: Ranks) -> nn.Module:
    if config.routed is None:
        return SandwichLayer(config, layer, ranks)
    mlp = routed_mlp(config, config.routed if layer >= config.num_dense_layers else None, ranks)
    return DecoderLayer(config, GroupedQueryAttention(config, layer, ranks.attention), mlp)

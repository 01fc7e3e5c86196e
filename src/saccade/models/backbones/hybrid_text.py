"""A text decoder with two kinds of layers: gated attention to all tokens, and gated delta nets, which keep a state.

Formulas: transformers, modeling_qwen3_5.py (Qwen3_5Attention, Qwen3_5RMSNorm, Qwen3_5DecoderLayer) and
modeling_qwen3_5_moe.py (Qwen3_5MoeSparseMoeBlock). Shapes: N tokens, E hidden size, Q query heads, K key/value heads,
D head size.
"""

import torch
from torch import nn

from saccade.models.backbones.decoder import EmbeddingDecoder, GatedMlp
from saccade.models.backbones.gated_delta_net import GatedDeltaNet
from saccade.models.backbones.hybrid_config import HybridConfig
from saccade.models.backbones.qwen_config import ExpertsConfig
from saccade.models.backbones.qwen_text import MixtureOfExperts
from saccade.nn.context import ForwardContext
from saccade.nn.layers import Attention, Layer, Linear
from saccade.nn.ops import CosSin
from saccade.nn.parallel import ALONE, Ranks
from saccade.nn.rope import cos_sin, interleaved_axes, inverse_frequencies


class OffsetNorm(Layer):
    """x / rms(x) * (1 + weight) over the last dimension, in float32: 1 + weight has too many digits for bfloat16."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps
        self.scale = torch.empty(0)

    def finish(self) -> None:
        """Add 1 to the loaded weight."""
        self.scale = 1 + self.weight.float()

    def forward(self, x_NE: torch.Tensor) -> torch.Tensor:
        """Normalise [N, size]."""
        return self.ops.rms_norm(x_NE, self.scale, self.eps)


class GatedAttention(Layer):
    """Grouped-query attention with a sigmoid gate for each channel of its output, projected with the queries.

    The checkpoint's `q_proj` has for each head D rows of the query, then D rows of the gate.
    """

    def __init__(self, config: HybridConfig, layer: int, ranks: Ranks) -> None:
        super().__init__()
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        width, bias = config.head_dim, config.attention_bias
        units = (num_heads, num_kv_heads, num_kv_heads)
        widths = (num_heads * 2 * width, num_kv_heads * width, num_kv_heads * width)
        self.head_dim, self.norm_eps = width, config.norm_eps
        self.qkv_proj = Linear(config.hidden_size, widths, bias, split="outputs", units=units, ranks=ranks)
        self.o_proj = Linear(num_heads * width, config.hidden_size, bias, split="inputs", ranks=ranks)
        self.q_norm = OffsetNorm(width, config.norm_eps)
        self.k_norm = OffsetNorm(width, config.norm_eps)
        self.attention = Attention(layer, ranks.divide(num_heads), ranks.share(num_kv_heads))
        self.qk_scale_HD = torch.empty(0)

    def finish(self) -> None:
        """Concatenate the norms of all heads, so that one call normalises queries and keys."""
        self.q_norm.finish()
        self.k_norm.finish()
        num_heads, num_kv_heads = self.attention.num_heads, self.attention.num_kv_heads
        q_HD, k_HD = self.q_norm.scale.expand(num_heads, -1), self.k_norm.scale.expand(num_kv_heads, -1)
        self.qk_scale_HD = torch.cat((q_HD, k_HD))

    def add_to(
        self, residual_NE: torch.Tensor, x_NE: torch.Tensor, cos_sin: CosSin, context: ForwardContext
    ) -> torch.Tensor:
        """Attend over *x_NE*, and return the residual plus the result."""
        num_heads, num_kv_heads = self.attention.num_heads, self.attention.num_kv_heads
        qkv_NHD = self.qkv_proj(x_NE).view(len(x_NE), -1, self.head_dim)
        gated_q, k_NKD, v_NKD = qkv_NHD.split_with_sizes((2 * num_heads, num_kv_heads, num_kv_heads), dim=1)
        q_NQD, gate_NQD = gated_q.unflatten(1, (num_heads, 2)).unbind(2)
        qk_NHD = torch.cat((q_NQD, k_NKD), 1)
        qk_NHD = self.ops.norm_rotary(qk_NHD, self.qk_scale_HD, self.norm_eps, cos_sin)
        q_NQD, k_NKD = qk_NHD.split_with_sizes((num_heads, num_kv_heads), dim=1)
        attended = self.attention(q_NQD, k_NKD, v_NKD, context)
        return self.o_proj.add_to(residual_NE, attended * gate_NQD.flatten(1).sigmoid())


class SharedExpertMixture(MixtureOfExperts):
    """A mixture of experts plus an MLP for all tokens, weighted by a sigmoid gate for each token."""

    def __init__(self, config: HybridConfig, experts: ExpertsConfig, ranks: Ranks) -> None:
        super().__init__(config, experts, ranks)
        self.shared_expert = GatedMlp(config.hidden_size, config.intermediate_size, ranks)
        self.shared_expert_gate = Linear(config.hidden_size, 1, bias=False)

    def add_to(self, residual_NE: torch.Tensor, x_NE: torch.Tensor) -> torch.Tensor:
        """Return *residual_NE* plus the results of the chosen experts and of the shared one for *x_NE*."""
        share_N1 = self.shared_expert_gate(x_NE).sigmoid()
        return super().add_to(residual_NE, x_NE) + share_N1 * self.shared_expert(x_NE)  # type: ignore[no-any-return]


class HybridLayer(nn.Module):
    """Attention or a delta net, then the MLP or the experts; each reads a normalised input and adds to the residual."""

    def __init__(self, config: HybridConfig, layer: int, ranks: Ranks) -> None:
        super().__init__()
        self.is_full = layer in config.full_attention
        self.input_layernorm = OffsetNorm(config.hidden_size, config.norm_eps)
        if self.is_full:
            self.self_attn = GatedAttention(config, layer, ranks.attention)
        else:
            shared, hidden_size = ranks.attention, config.hidden_size
            self.linear_attn = GatedDeltaNet(config.delta_net, hidden_size, config.norm_eps, layer, shared)
        self.post_attention_layernorm = OffsetNorm(config.hidden_size, config.norm_eps)
        self.mlp = (
            GatedMlp(config.hidden_size, config.intermediate_size, ranks)
            if config.experts is None
            else SharedExpertMixture(config, config.experts, ranks)
        )

    def forward(self, x_NE: torch.Tensor, cos_sin: CosSin, context: ForwardContext) -> torch.Tensor:
        """Map [N, E] to [N, E]."""
        normed_NE = self.input_layernorm(x_NE)
        if self.is_full:
            x_NE = self.self_attn.add_to(x_NE, normed_NE, cos_sin, context)
        else:
            x_NE = self.linear_attn.add_to(x_NE, normed_NE, context)
        return self.mlp.add_to(x_NE, self.post_attention_layernorm(x_NE))


class HybridDecoder(EmbeddingDecoder):
    """Maps embeddings to hidden states."""

    def __init__(self, config: HybridConfig, ranks: Ranks = ALONE) -> None:
        super().__init__(config.vocab_size, config.hidden_size)
        self.config = config
        self.layers = nn.ModuleList(HybridLayer(config, layer, ranks) for layer in range(config.num_layers))
        self.norm = OffsetNorm(config.hidden_size, config.norm_eps)
        self.axes = self.frequencies = torch.empty(0)

    def finish(self) -> None:
        """Compute the values derived from the loaded weights and their device."""
        device = self.embedding_VE.device
        self.axes = torch.tensor(interleaved_axes(self.config.mrope_section), device=device)
        rope = self.config.rope
        self.frequencies = inverse_frequencies(rope.theta, 2 * len(rope.divisors), device, rope.divisors)
        for module in self.modules():
            if isinstance(module, OffsetNorm | GatedAttention | GatedDeltaNet):
                module.finish()

    def forward(self, x_NE: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Return normalised hidden states [N, E]."""
        # Each rotated channel is rotated by one of the three axes.
        angles = context.positions.index_select(0, self.axes).t() * self.frequencies
        rotation = cos_sin(angles, x_NE.dtype, self.config.rope.magnitude)
        for layer in self.layers:
            x_NE = layer(x_NE, rotation, context)
        return self.norm(x_NE)  # type: ignore[no-any-return]

"""A text decoder with two kinds of layers: gated attention to all tokens, and gated delta nets, which keep a state.

Formulas: transformers, modeling_qwen3_5.py (Qwen3_5Attention, Qwen3_5RMSNorm, Qwen3_5DecoderLayer) and
modeling_qwen3_5_moe.py (Qwen3_5MoeSparseMoeBlock). Shapes: N tokens, E hidden size, Q query heads, K key/value heads,
D head size.
"""

import torch

from saccade.models.backbones.decoder import DecoderLayer, GatedMlp, TextDecoder
from saccade.models.backbones.gated_delta_net import GatedDeltaNet
from saccade.models.backbones.grouped_query_text import MixtureOfExperts, mlp_of
from saccade.models.backbones.text_config import ExpertsConfig, HybridConfig, TextConfig
from saccade.nn.context import ForwardContext, KvCache
from saccade.nn.layers import Attention, Layer, Linear, OffsetNorm, head_scales
from saccade.nn.ops import CosSin
from saccade.nn.parallel import ALONE, Ranks


class GatedAttention(Layer):
    """Grouped-query attention with a sigmoid gate for each output channel. The gates are projected with the queries.

    For each head, the checkpoint's `q_proj` has D rows for the query, then D rows for the gate.
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
        """Concatenate the norm scales of all heads, so that one call normalises queries and keys."""
        counts = self.attention.num_heads, self.attention.num_kv_heads
        self.qk_scale_HD = head_scales(tuple(zip((self.q_norm, self.k_norm), counts, strict=True)))

    def add_to(
        self, residual_NE: torch.Tensor, x_NE: torch.Tensor, cos_sin: CosSin, context: ForwardContext
    ) -> torch.Tensor:
        """Attend over *x_NE*, and return the residual plus the result."""
        q_NQD, gate_NQD, own = self.cached_heads(x_NE, cos_sin, context)
        attended = self.attention.attend(q_NQD, own, context)
        return self.o_proj.add_to(residual_NE, attended * gate_NQD.flatten(1).sigmoid())

    def cached_heads(
        self, x_NE: torch.Tensor, cos_sin: CosSin, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Write the keys and values of *x_NE*; return queries and gates [N, Q, D], and the keys and values."""
        num_heads, num_kv_heads = self.attention.num_heads, self.attention.num_kv_heads
        qkv_NHD = self.qkv_proj(x_NE).view(len(x_NE), -1, self.head_dim)
        gated_q, k_NKD, v_NKD = qkv_NHD.split_with_sizes((2 * num_heads, num_kv_heads, num_kv_heads), dim=1)
        q_NQD, gate_NQD = gated_q.unflatten(1, (num_heads, 2)).unbind(2)
        q_NQD, own = self.ops.cached_heads(
            torch.cat((q_NQD, k_NKD, v_NKD), 1),
            num_kv_heads,
            self.qk_scale_HD,
            self.norm_eps,
            cos_sin,
            context.cache(self.attention.layer, KvCache),
            context.layout.slot_mapping,
        )
        return q_NQD, gate_NQD, own


class SharedExpertMixture(MixtureOfExperts):
    """A mixture of experts, plus an MLP for all tokens. A sigmoid gate weights the MLP's result for each token."""

    def __init__(self, config: TextConfig, experts: ExpertsConfig, ranks: Ranks) -> None:
        super().__init__(config, experts, ranks)
        self.shared_expert = GatedMlp(config.hidden_size, config.intermediate_size, ranks)
        self.shared_expert_gate = Linear(config.hidden_size, 1, bias=False)

    def add_to(self, residual_NE: torch.Tensor, x_NE: torch.Tensor) -> torch.Tensor:
        """Return *residual_NE* plus the results of the chosen experts and the shared expert for *x_NE*."""
        share_N1 = self.shared_expert_gate(x_NE).sigmoid()
        summand_NE = self.experts.summand(x_NE, *self.choose(x_NE)) + share_N1 * self.shared_expert.summand(x_NE)
        return residual_NE + self.experts.ranks.all_reduce(summand_NE)


class HybridDecoder(TextDecoder):
    """Maps embeddings to hidden states."""

    def __init__(self, config: HybridConfig, ranks: Ranks = ALONE) -> None:
        super().__init__(
            config, ranks, (_layer(config, layer, ranks) for layer in range(config.num_layers)), OffsetNorm
        )


def _layer(config: HybridConfig, layer: int, ranks: Ranks) -> DecoderLayer:
    mlp = mlp_of(config, layer, ranks, SharedExpertMixture)
    if layer in config.full_attention:
        return DecoderLayer(config, GatedAttention(config, layer, ranks.attention), mlp, OffsetNorm)
    mixer = GatedDeltaNet(config.delta_net, config.hidden_size, config.norm_eps, layer, ranks.attention)
    return DecoderLayer(config, mixer, mlp, OffsetNorm, "linear_attn")

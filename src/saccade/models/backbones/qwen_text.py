"""Qwen's text decoder: grouped-query attention with multimodal rotary positions, then an MLP or a mixture of experts.

Formulas: transformers, modeling_qwen3_vl.py (Qwen3VLText*), modeling_qwen2_vl.py (Qwen2VLAttention) and
modeling_qwen3_vl_moe.py (Qwen3VLMoeTextSparseMoeBlock). Shapes: N tokens, E hidden size, Q query heads, K key/value
heads, H = Q + K, D head size, C experts that compute a token.
"""

from collections.abc import Sequence

import torch
from torch import nn

from saccade.models.backbones.decoder import DecoderLayer, EmbeddingDecoder, GatedMlp
from saccade.models.backbones.qwen_config import ExpertsConfig, QwenTextConfig
from saccade.nn.context import ForwardContext
from saccade.nn.experts import Experts, softmax_top_k
from saccade.nn.layers import Attention, Layer, Linear, RMSNorm
from saccade.nn.ops import CosSin
from saccade.nn.parallel import ALONE, Ranks
from saccade.nn.rope import chunked_axes, cos_sin, interleaved_axes, inverse_frequencies


class QwenAttention(Layer):
    """One matrix computes queries, keys and values; queries and keys are rotated per head, some after a norm."""

    def __init__(self, config: QwenTextConfig, layer: int, ranks: Ranks) -> None:
        super().__init__()
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        head_dim, bias = config.head_dim, config.attention_bias
        qkv_bias = bias or config.style.qkv_bias
        self.norm_eps = config.norm_eps
        self.head_dim = head_dim
        units = (num_heads, num_kv_heads, num_kv_heads)
        widths = tuple(count * head_dim for count in units)
        self.qkv_proj = Linear(config.hidden_size, widths, qkv_bias, split="outputs", units=units, ranks=ranks)
        self.o_proj = Linear(num_heads * head_dim, config.hidden_size, bias, split="inputs", ranks=ranks)
        self.q_norm = RMSNorm(head_dim, config.norm_eps) if config.style.normed_heads else None
        self.k_norm = RMSNorm(head_dim, config.norm_eps) if config.style.normed_heads else None
        self.attention = Attention(layer, ranks.divide(num_heads), ranks.share(num_kv_heads))
        self.qk_weight_HD = torch.empty(0)

    def join(self) -> None:
        """Concatenate the loaded norm weights of all heads, so that one call normalises queries and keys."""
        if self.q_norm is None or self.k_norm is None:
            return
        num_heads, num_kv_heads = self.attention.num_heads, self.attention.num_kv_heads
        q_HD, k_HD = self.q_norm.weight.expand(num_heads, -1), self.k_norm.weight.expand(num_kv_heads, -1)
        self.qk_weight_HD = torch.cat((q_HD, k_HD))

    def add_to(
        self, residual_NE: torch.Tensor, x_NE: torch.Tensor, cos_sin: CosSin, context: ForwardContext
    ) -> torch.Tensor:
        """Attend over *x_NE*, and return the residual plus the result."""
        qkv_NHD = self.qkv_proj(x_NE).view(x_NE.shape[0], -1, self.head_dim)
        num_heads, num_kv_heads = self.attention.num_heads, self.attention.num_kv_heads
        qk_NHD, v_NKD = qkv_NHD.split_with_sizes((num_heads + num_kv_heads, num_kv_heads), dim=1)
        if self.q_norm is None:
            qk_NHD = self.ops.rotary(qk_NHD, cos_sin)
        else:
            qk_NHD = self.ops.norm_rotary(qk_NHD, self.qk_weight_HD, self.norm_eps, cos_sin)
        q_NQD, k_NKD = qk_NHD.split_with_sizes((num_heads, num_kv_heads), dim=1)
        attended = self.attention(q_NQD, k_NKD, v_NKD, context)
        return self.o_proj.add_to(residual_NE, attended)


class MixtureOfExperts(nn.Module):
    """A router chooses experts for each token by their probabilities, which weigh the experts' results."""

    def __init__(self, config: QwenTextConfig, experts: ExpertsConfig, ranks: Ranks) -> None:
        super().__init__()
        self.config = experts
        self.gate = Linear(config.hidden_size, experts.num_experts, bias=False)
        self.experts = Experts(experts.num_experts, config.hidden_size, experts.intermediate_size, ranks)

    def add_to(self, residual_NE: torch.Tensor, x_NE: torch.Tensor) -> torch.Tensor:
        """Return *residual_NE* plus the weighted results of the experts chosen for *x_NE*."""
        top_k, normalised = self.config.num_chosen, self.config.normalised
        ids_NC, weights_NC = softmax_top_k(self.gate(x_NE), top_k, renormalise=normalised)
        return residual_NE + self.experts(x_NE, ids_NC, weights_NC)  # type: ignore[no-any-return]


def _layer(config: QwenTextConfig, layer: int, ranks: Ranks) -> DecoderLayer:
    attention = QwenAttention(config, layer, ranks.attention)
    return DecoderLayer(attention, _mlp(config, layer, ranks), config.hidden_size, config.norm_eps)


def _mlp(config: QwenTextConfig, layer: int, ranks: Ranks) -> GatedMlp | MixtureOfExperts:
    if config.experts is not None and layer in config.experts.layers:
        return MixtureOfExperts(config, config.experts, ranks)
    return GatedMlp(config.hidden_size, config.intermediate_size, ranks)


class QwenTextDecoder(EmbeddingDecoder):
    """Maps embeddings to hidden states. Features may be added after the first layers, at chosen rows."""

    def __init__(self, config: QwenTextConfig, ranks: Ranks = ALONE) -> None:
        super().__init__(config.vocab_size, config.hidden_size)
        self.config = config
        self.layers = nn.ModuleList(_layer(config, layer, ranks) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.axes = self.frequencies = torch.empty(0)

    def finish(self) -> None:
        """Compute the values derived from the loaded weights and their device."""
        device = self.embedding_VE.device
        axes = interleaved_axes if self.config.style.interleaved_axes else chunked_axes
        self.axes = torch.tensor(axes(self.config.mrope_section), device=device)
        rope = self.config.rope
        self.frequencies = inverse_frequencies(rope.theta, 2 * len(rope.divisors), device, rope.divisors)
        for layer in self.layers:
            layer.self_attn.join()  # type: ignore[union-attr,operator]

    def forward(
        self,
        x_NE: torch.Tensor,
        context: ForwardContext,
        rows: torch.Tensor | None = None,
        features: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        """Return normalised hidden states [N, E]; features[i] is added at *rows* after layer i."""
        # Each channel is rotated by one of the three axes.
        angles = context.positions.index_select(0, self.axes).t() * self.frequencies
        rotation = cos_sin(angles, x_NE.dtype, self.config.rope.magnitude)
        for index, layer in enumerate(self.layers):
            x_NE = layer(x_NE, rotation, context)
            if rows is not None and index < len(features):
                x_NE.index_add_(0, rows, features[index])
        return self.norm(x_NE)  # type: ignore[no-any-return]

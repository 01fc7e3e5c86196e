"""The decoder of Llama, Mistral, Phi-3, Qwen2 and Qwen3: grouped-query attention, then an MLP or a mixture of experts.

Formulas: transformers, modeling_llama.py, modeling_mistral.py, modeling_phi3.py, modeling_qwen2_vl.py
(Qwen2VLAttention), modeling_qwen3_vl.py (Qwen3VLText*) and modeling_qwen3_vl_moe.py (Qwen3VLMoeTextSparseMoeBlock).
Shapes: N tokens, E hidden size, Q query heads, K key/value heads, H = Q + K, D head size, C experts per token.
"""

from typing import Any, ClassVar

import torch
from torch import nn

from saccade.models.backbones.decoder import DecoderLayer, GatedMlp, TextDecoder
from saccade.models.backbones.text_config import ExpertsConfig, TextConfig
from saccade.nn.context import ForwardContext, KvCache, Scoring
from saccade.nn.experts import Experts
from saccade.nn.layers import Attention, Layer, Linear, RMSNorm
from saccade.nn.ops import CosSin
from saccade.nn.parallel import ALONE, Ranks


class GroupedQueryAttention(Layer):
    """Grouped-query attention in which one matrix computes queries, keys and values.

    Each head's queries and keys are rotated, in some models after a norm.
    """

    def __init__(self, config: TextConfig, layer: int, ranks: Ranks) -> None:
        super().__init__()
        num_heads, num_kv_heads, bias = config.num_heads, config.num_kv_heads, config.attention_bias
        self.head_dim, self.norm_eps = config.head_dim, config.norm_eps
        units = (num_heads, num_kv_heads, num_kv_heads)
        widths = tuple(count * self.head_dim for count in units)
        qkv_bias = bias or config.style.qkv_bias
        self.qkv_proj = Linear(config.hidden_size, widths, qkv_bias, split="outputs", units=units, ranks=ranks)
        self.o_proj = Linear(num_heads * self.head_dim, config.hidden_size, bias, split="inputs", ranks=ranks)
        self.q_norm = RMSNorm(self.head_dim, config.norm_eps) if config.style.normed_heads else None
        self.k_norm = RMSNorm(self.head_dim, config.norm_eps) if config.style.normed_heads else None
        scoring = Scoring(window=config.sliding_window)
        self.attention = Attention(layer, ranks.divide(num_heads), ranks.share(num_kv_heads), scoring)
        self.qk_weight_HD = torch.empty(0)

    def finish(self) -> None:
        """Concatenate the loaded norm weights of all heads, so that one call normalises queries and keys."""
        if self.q_norm is None or self.k_norm is None:
            return
        num_heads, num_kv_heads = self.attention.num_heads, self.attention.num_kv_heads
        q_HD, k_HD = self.q_norm.weight.expand(num_heads, -1), self.k_norm.weight.expand(num_kv_heads, -1)
        self.qk_weight_HD = torch.cat((q_HD, k_HD))

    def add_to(
        self, residual_NE: torch.Tensor, x_NE: torch.Tensor, rotation: Any, context: ForwardContext
    ) -> torch.Tensor:
        """Attend over *x_NE*, and return the residual plus the result; *rotation* is the decoder's."""
        return self.o_proj.add_to(residual_NE, self.attend(x_NE, rotation, context))

    def attend(self, x_NE: torch.Tensor, rotation: Any, context: ForwardContext) -> torch.Tensor:
        """Return the attended values [N, Q * D]."""
        q_NQD, own = self.cached_heads(x_NE, rotation, context)
        return self.attention.attend(q_NQD, own, context)

    def cached_heads(
        self, x_NE: torch.Tensor, rotation: CosSin, context: ForwardContext
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Write the keys and values of *x_NE*; return queries [N, Q, D], and the keys and values."""
        return self.ops.cached_heads(
            self.qkv_proj(x_NE).view(x_NE.shape[0], -1, self.head_dim),
            self.attention.num_kv_heads,
            None if self.q_norm is None else self.qk_weight_HD,
            self.norm_eps,
            rotation,
            context.cache(self.attention.layer, KvCache),
            context.layout.slot_mapping,
        )


class MixtureOfExperts(nn.Module):
    """A router picks each token's most probable experts, and weights their results by their probabilities."""

    def __init__(self, config: TextConfig, experts: ExpertsConfig, ranks: Ranks) -> None:
        super().__init__()
        self.config = experts
        self.gate = Linear(config.hidden_size, experts.num_experts, bias=False)
        self.experts = Experts(experts.num_experts, config.hidden_size, experts.intermediate_size, ranks)

    def add_to(self, residual_NE: torch.Tensor, x_NE: torch.Tensor) -> torch.Tensor:
        """Return *residual_NE* plus the weighted results of the experts chosen for *x_NE*."""
        return residual_NE + self.experts(x_NE, *self.choose(x_NE))  # type: ignore[no-any-return]

    def choose(self, x_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids and weights [N, C] of each token's experts."""
        return self.experts.ops.softmax_top_k(self.gate(x_NE), self.config.num_chosen, self.config.normalised)


def mlp_of(
    config: TextConfig, layer: int, ranks: Ranks, mixture: type[MixtureOfExperts] = MixtureOfExperts
) -> GatedMlp | MixtureOfExperts:
    """Return the MLP of *layer*, or its mixture of experts."""
    if config.experts is not None and layer in config.experts.layers:
        return mixture(config, config.experts, ranks)
    return GatedMlp(config.hidden_size, config.intermediate_size, ranks, bias=config.mlp_bias)


class GroupedQueryDecoder(TextDecoder):
    """Maps embeddings to hidden states. Its layers use the class *attention*."""

    attention: ClassVar[type[GroupedQueryAttention]] = GroupedQueryAttention

    def __init__(self, config: TextConfig, ranks: Ranks = ALONE) -> None:
        parts = (
            (self.attention(config, layer, ranks.attention), mlp_of(config, layer, ranks))
            for layer in range(config.num_layers)
        )
        super().__init__(config, ranks, (DecoderLayer(config, *own) for own in parts))

"""Gemma 3's text decoder, with sliding-window layers and layers that attend to all tokens.

Formulas: transformers 5.23, the text model of Gemma 3. Shapes: N tokens, E hidden size, Q query heads, K
key/value heads, H = Q + K, D head size.
"""

import torch
from torch import nn

from saccade.models.backbones.decoder import GatedMlp, TextDecoder
from saccade.models.backbones.windowed_config import LayerKind, WindowedConfig
from saccade.nn.context import ForwardContext, KvCache, Scoring
from saccade.nn.layers import Attention, Layer, Linear, OffsetNorm, head_scales
from saccade.nn.ops import GELU_TANH, CosSin
from saccade.nn.parallel import ALONE, Ranks
from saccade.nn.rope import cos_sin, inverse_frequencies

Rotations = dict[LayerKind, CosSin]


class WindowedAttention(Layer):
    """Grouped-query attention with a norm for each head's queries and keys. An image's tokens see the whole image."""

    def __init__(self, config: WindowedConfig, layer: int, ranks: Ranks) -> None:
        super().__init__()
        num_heads, num_kv_heads, bias = config.num_heads, config.num_kv_heads, config.attention_bias
        self.kind, self.head_dim, self.norm_eps = config.kinds[layer], config.head_dim, config.norm_eps
        units = (num_heads, num_kv_heads, num_kv_heads)
        widths = tuple(count * self.head_dim for count in units)
        self.qkv_proj = Linear(config.hidden_size, widths, bias, split="outputs", units=units, ranks=ranks)
        self.o_proj = Linear(num_heads * self.head_dim, config.hidden_size, bias, split="inputs", ranks=ranks)
        self.q_norm = OffsetNorm(self.head_dim, config.norm_eps)
        self.k_norm = OffsetNorm(self.head_dim, config.norm_eps)
        scoring = Scoring(config.score_scale, self.kind.window, looks_ahead=True)
        self.attention = Attention(layer, ranks.divide(num_heads), ranks.share(num_kv_heads), scoring)
        self.qk_scale_HD = torch.empty(0)

    def finish(self) -> None:
        """Concatenate the norm scales of all heads, so that one call normalises queries and keys."""
        counts = self.attention.num_heads, self.attention.num_kv_heads
        self.qk_scale_HD = head_scales(tuple(zip((self.q_norm, self.k_norm), counts, strict=True)))

    def forward(self, x_NE: torch.Tensor, rotations: Rotations, context: ForwardContext) -> torch.Tensor:
        """Map [N, E] to [N, E]."""
        context = context.of_window(self.kind.window)
        q_NQD, own = self.ops.cached_heads(
            self.qkv_proj(x_NE).view(len(x_NE), -1, self.head_dim),
            self.attention.num_kv_heads,
            self.qk_scale_HD,
            self.norm_eps,
            rotations[self.kind],
            context.cache(self.attention.layer, KvCache),
            context.layout.slot_mapping,
        )
        return self.o_proj(self.attention.attend(q_NQD, own, context))  # type: ignore[no-any-return]


class WindowedLayer(nn.Module):
    """Attention, then an MLP. Each reads a normalised input and adds its normalised result to the residual."""

    def __init__(self, config: WindowedConfig, layer: int, ranks: Ranks) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.self_attn = WindowedAttention(config, layer, ranks.attention)
        self.mlp = GatedMlp(size, config.intermediate_size, ranks, activation=GELU_TANH)
        self.input_layernorm = OffsetNorm(size, eps)
        self.post_attention_layernorm = OffsetNorm(size, eps)
        self.pre_feedforward_layernorm = OffsetNorm(size, eps)
        self.post_feedforward_layernorm = OffsetNorm(size, eps)

    def forward(self, x_NE: torch.Tensor, rotations: Rotations, context: ForwardContext) -> torch.Tensor:
        """Map [N, E] to [N, E]."""
        attended_NE = self.self_attn(self.input_layernorm(x_NE), rotations, context)
        x_NE = x_NE + self.post_attention_layernorm(attended_NE)
        return x_NE + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x_NE)))  # type: ignore[no-any-return]


class WindowedDecoder(TextDecoder):
    """Maps embeddings, scaled by the square root of their width, to hidden states."""

    config: WindowedConfig

    def __init__(self, config: WindowedConfig, ranks: Ranks = ALONE) -> None:
        layers = (WindowedLayer(config, layer, ranks) for layer in range(config.num_layers))
        super().__init__(config, ranks, layers, OffsetNorm)
        self.frequencies_of: dict[LayerKind, torch.Tensor] = {}
        self.embedding_scale = 1.0

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Map int64 ids [N] to embeddings [N, E]."""
        return super().embed(input_ids) * self.embedding_scale

    def finish(self) -> None:
        """Compute the embedding scale and the rotary frequencies of each kind of layer, on the weights' device."""
        super().finish()
        device, dtype = self.embedding_VE.device, self.embedding_VE.dtype
        # The reference rounds the factor, too.
        self.embedding_scale = torch.tensor(self.config.hidden_size**0.5, dtype=dtype).item()
        for kind in self.config.kinds:
            rope = kind.rope
            self.frequencies_of[kind] = inverse_frequencies(rope.theta, self.config.head_dim, device, rope.divisors)

    def rotation_at(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotations:
        """Return the rotation of each kind of layer for tokens at *positions* int64 [3, N]."""
        positions_N1 = positions[0].unsqueeze(1)
        return {
            kind: cos_sin(positions_N1 * frequencies, dtype, kind.rope.magnitude)
            for kind, frequencies in self.frequencies_of.items()
        }

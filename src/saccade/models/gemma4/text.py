"""The text decoder, with sliding-window layers and layers that attend to all tokens.

Formulas: transformers 5.23, modeling_gemma4.py (Gemma4Text*). Shapes: N tokens, E hidden size, H heads, D head size, L
layers, P width of a layer's own embeddings, C experts per token.
"""

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from saccade.models.backbones.decoder import GatedMlp, TextDecoder
from saccade.models.gemma4.spec import GemmaExperts, GemmaText, LayerKind
from saccade.nn.context import ForwardContext, KvCache, Scoring
from saccade.nn.experts import Experts
from saccade.nn.layers import Attention, Embedding, FloatNorm, Layer, Linear
from saccade.nn.ops import GELU_TANH, CosSin, norm_rotary
from saccade.nn.parallel import ALONE, Ranks
from saccade.nn.rope import cos_sin, inverse_frequencies

KeysValues = tuple[torch.Tensor, torch.Tensor]


def normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / rms(x) over the last dimension, computed in float32."""
    return functional.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype)


class Step(NamedTuple):
    """Values that the layers share within a step.

    *rotations* holds the rotation for each kind of layer, and *states* the keys and values of each layer. *own_NLP*
    holds each layer's own embeddings, or is None if there are none.
    """

    context: ForwardContext
    rotations: dict[LayerKind, CosSin]
    own_NLP: torch.Tensor | None
    states: dict[int, KeysValues]


class GemmaAttention(Layer):
    """Grouped-query attention with unscaled scores.

    Each head's queries and keys have a norm with weights, and its values one without.
    """

    def __init__(self, config: GemmaText, layer: int, ranks: Ranks) -> None:
        super().__init__()
        self.kind, num_heads, bias = config.kinds[layer], config.num_heads, config.attention_bias
        cache = config.cache_of(layer)
        self.has_keys = cache == layer
        num_kv_heads, head_dim = self.kind.num_kv_heads, self.kind.head_dim
        own = (num_kv_heads,) * (1 if self.kind.keys_are_values else 2)
        units = (num_heads, *own) if self.has_keys else (num_heads,)
        widths = tuple(count * head_dim for count in units)
        self.qkv_proj = Linear(config.hidden_size, widths, bias, split="outputs", units=units, ranks=ranks)
        self.o_proj = Linear(num_heads * head_dim, config.hidden_size, bias, split="inputs", ranks=ranks)
        self.q_norm = FloatNorm(head_dim, config.norm_eps)
        self.k_norm = FloatNorm(head_dim, config.norm_eps) if self.has_keys else None
        window = self.kind.window
        scoring = Scoring(1.0, window, looks_ahead=config.sees_images and window is not None)
        self.attention = Attention(cache, ranks.divide(num_heads), ranks.share(num_kv_heads), scoring)
        self.weights_HD = torch.empty(0)

    def finish(self) -> None:
        """Concatenate the norm weights of all heads, so that one call normalises queries and keys."""
        norms = [(self.q_norm, self.attention.num_heads)]
        if self.k_norm is not None:
            norms.append((self.k_norm, self.attention.num_kv_heads))
        self.weights_HD = torch.cat([norm.weight.float().expand(count, -1) for norm, count in norms])

    def forward(self, x_NE: torch.Tensor, step: Step) -> torch.Tensor:
        """Map [N, E] to [N, E]."""
        num_heads, num_kv_heads, eps = self.attention.num_heads, self.attention.num_kv_heads, self.q_norm.eps
        context = step.context.of_window(self.kind.window)
        qkv_NHD = self.qkv_proj(x_NE).view(len(x_NE), -1, self.kind.head_dim)
        rotated_NHD = norm_rotary(qkv_NHD[:, : len(self.weights_HD)], self.weights_HD, eps, step.rotations[self.kind])
        if self.has_keys:
            # The last heads: values, or the keys in their place.
            cache, slots = context.cache(self.attention.layer, KvCache), context.layout.slot_mapping
            values_NKD = normed(qkv_NHD[:, -num_kv_heads:], eps)
            step.states[self.attention.layer] = cache.write(slots, rotated_NHD[:, num_heads:], values_NKD)
        own = step.states[self.attention.layer]
        return self.o_proj(self.attention.attend(rotated_NHD[:, :num_heads], own, context))  # type: ignore[no-any-return]


class Router(Layer):
    """Picks experts by the normalised and scaled input. Each expert has a factor that multiplies its weight."""

    def __init__(self, config: GemmaText, experts: GemmaExperts) -> None:
        super().__init__()
        self.eps, self.num_chosen, self.root = config.norm_eps, experts.num_chosen, config.hidden_size**-0.5
        self.proj = Linear(config.hidden_size, experts.num_experts, bias=False)
        self.scale = nn.Parameter(torch.empty(config.hidden_size), requires_grad=False)
        self.per_expert_scale = nn.Parameter(torch.empty(experts.num_experts), requires_grad=False)

    def forward(self, x_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the chosen experts' ids int64 [N, C] and weights [N, C]."""
        logits = self.proj(normed(x_NE, self.eps) * self.scale * self.root)
        ids_NC, weights_NC = self.ops.softmax_top_k(logits, self.num_chosen, True)
        return ids_NC, weights_NC * self.per_expert_scale[ids_NC]


class Mixture(nn.Module):
    """Experts alongside an MLP. Both read the same residual, and both results are normalised before they are added."""

    def __init__(self, config: GemmaText, experts: GemmaExperts, ranks: Ranks) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.router = Router(config, experts)
        self.experts = Experts(experts.num_experts, size, experts.intermediate_size, ranks, GELU_TANH)
        self.post_feedforward_layernorm_1 = FloatNorm(size, eps)
        self.post_feedforward_layernorm_2 = FloatNorm(size, eps)
        self.pre_feedforward_layernorm_2 = FloatNorm(size, eps)

    def forward(self, dense_NE: torch.Tensor, residual_NE: torch.Tensor) -> torch.Tensor:
        """Return the MLP's result *dense_NE* plus the experts' for *residual_NE*, each normalised first."""
        chosen_NE = self.experts(self.pre_feedforward_layernorm_2(residual_NE), *self.router(residual_NE))
        return self.post_feedforward_layernorm_1(dense_NE) + self.post_feedforward_layernorm_2(chosen_NE)  # type: ignore[no-any-return]


class OwnEmbeddings(nn.Module):
    """Adds a layer's projection of its own token embeddings to the residual."""

    def __init__(self, config: GemmaText) -> None:
        super().__init__()
        size, width = config.hidden_size, config.per_layer_width
        self.per_layer_input_gate = Linear(size, width, bias=False)
        self.per_layer_projection = Linear(width, size, bias=False)
        self.post_per_layer_input_norm = FloatNorm(size, config.norm_eps)

    def forward(self, x_NE: torch.Tensor, own_NP: torch.Tensor) -> torch.Tensor:
        """Map [N, E] to [N, E]."""
        gated_NP = self.per_layer_input_gate(x_NE, GELU_TANH) * own_NP
        return x_NE + self.post_per_layer_input_norm(self.per_layer_projection(gated_NP))  # type: ignore[no-any-return]


class GemmaLayer(nn.Module):
    """Attention, then an MLP, in some models with experts alongside it, then the layer's own embeddings.

    Each part adds its normalised result to the residual; attention, MLP and experts also read a normalised input. A
    learned scalar multiplies the layer's result.
    """

    def __init__(self, config: GemmaText, layer: int, ranks: Ranks) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        is_wide = config.double_wide and layer >= config.num_layers - config.num_shared
        width = config.intermediate_size * (2 if is_wide else 1)
        self.layer = layer
        self.self_attn = GemmaAttention(config, layer, ranks.attention)
        self.mlp = GatedMlp(size, width, ranks, activation=GELU_TANH)
        self.mixture = None if config.experts is None else Mixture(config, config.experts, ranks)
        self.own = OwnEmbeddings(config) if config.per_layer_width else None
        self.input_layernorm = FloatNorm(size, eps)
        self.post_attention_layernorm = FloatNorm(size, eps)
        self.pre_feedforward_layernorm = FloatNorm(size, eps)
        self.post_feedforward_layernorm = FloatNorm(size, eps)
        self.layer_scalar = nn.Parameter(torch.empty(1), requires_grad=False)

    def forward(self, x_NE: torch.Tensor, step: Step) -> torch.Tensor:
        """Map [N, E] to [N, E]."""
        x_NE = x_NE + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x_NE), step))
        result_NE = self.mlp(self.pre_feedforward_layernorm(x_NE))
        if self.mixture is not None:
            result_NE = self.mixture(result_NE, x_NE)
        x_NE = x_NE + self.post_feedforward_layernorm(result_NE)
        if self.own is not None and step.own_NLP is not None:
            x_NE = self.own(x_NE, step.own_NLP[:, self.layer])
        return x_NE * self.layer_scalar


class GemmaDecoder(TextDecoder):
    """Maps embeddings, scaled by the square root of their width, to hidden states."""

    config: GemmaText

    def __init__(self, config: GemmaText, ranks: Ranks = ALONE) -> None:
        super().__init__(
            config, ranks, (GemmaLayer(config, layer, ranks) for layer in range(config.num_layers)), FloatNorm
        )
        self.frequencies_of: dict[LayerKind, torch.Tensor] = {}
        self.embedding_scale = self.own_scale = 1.0
        if config.per_layer_width:
            width = config.num_layers * config.per_layer_width
            self.embed_tokens_per_layer = Embedding(config.per_layer_vocab, width, ranks)
            self.per_layer_model_projection = Linear(config.hidden_size, width, bias=False)
            self.per_layer_projection_norm = FloatNorm(config.per_layer_width, config.norm_eps)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Map int64 ids [N] to embeddings [N, E]."""
        return super().embed(input_ids) * self.embedding_scale

    def finish(self) -> None:
        """Compute the embedding scales and the rotary frequencies of each kind of layer, on the weights' device."""
        super().finish()
        device, dtype = self.embedding_VE.device, self.embedding_VE.dtype
        self.embedding_scale = _rounded(self.config.hidden_size**0.5, dtype)
        self.own_scale = _rounded(self.config.per_layer_width**0.5, dtype)
        for kind in self.config.kinds:
            self.frequencies_of[kind] = inverse_frequencies(kind.rope.theta, kind.head_dim, device, kind.rope.divisors)

    def own_embeddings(self, x_NE: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor | None:
        """Return the layers' own embeddings [N, L, P], from the ids and the embeddings *x_NE*, or None."""
        if not self.config.per_layer_width:
            return None
        shape = (self.config.num_layers, self.config.per_layer_width)
        own_NLP = self.embed_tokens_per_layer(input_ids).unflatten(1, shape)
        own_NLP = own_NLP * self.own_scale
        projected_NLP = (self.per_layer_model_projection(x_NE) * self.config.hidden_size**-0.5).unflatten(1, shape)
        return (self.per_layer_projection_norm(projected_NLP) + own_NLP) * 2.0**-0.5  # type: ignore[no-any-return]

    def decode(self, x_NE: torch.Tensor, context: ForwardContext, own_NLP: torch.Tensor | None) -> torch.Tensor:
        """Return normalised hidden states [N, E]; *own_NLP* is from own_embeddings()."""
        positions_N1 = context.positions[0].unsqueeze(1)
        rotations: dict[LayerKind, Any] = {
            kind: cos_sin(positions_N1 * frequencies, x_NE.dtype) for kind, frequencies in self.frequencies_of.items()
        }
        step = Step(context, rotations, own_NLP, {})
        for layer in self.layers:
            x_NE = layer(x_NE, step)
        return self.norm(x_NE)  # type: ignore[no-any-return]


def _rounded(factor: float, dtype: torch.dtype) -> float:
    """Return *factor* rounded to *dtype*, as in the reference."""
    return torch.tensor(factor, dtype=dtype).item()

"""Qwen's text decoder: grouped-query attention with normed queries and keys, multimodal rotary positions, SwiGLU.

Formulas: transformers, modeling_qwen3_vl.py (Qwen3VLText*). Shapes: N tokens, E hidden size, Q query heads,
K key/value heads, H = Q + K, D head size, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from saccade.errors import StartupError
from saccade.models.backbones.configuration import choice, integer, number, section
from saccade.nn.attention import Attention
from saccade.nn.context import Backend, ForwardContext, Turn
from saccade.nn.linear import Linear
from saccade.nn.norm import RMSNorm
from saccade.nn.rope import interleaved_axes, inverse_frequencies, rotation


@dataclass(frozen=True)
class TextConfig:
    """The text half of config.json, checked."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    attention_bias: bool
    rope_theta: float
    mrope_section: tuple[int, int, int]

    @classmethod
    def read(cls, text: Mapping[str, Any]) -> "TextConfig":
        """Read `text_config`. Raises StartupError, naming the key."""
        choice(text, "hidden_act", ("silu",))
        # Releases spell it rope_scaling beside rope_theta; newer ones put both into rope_parameters.
        rope = section(text, "rope_parameters" if "rope_parameters" in text else "rope_scaling")
        theta = rope if "rope_theta" in rope else text
        config = cls(
            vocab_size=integer(text, "vocab_size"),
            hidden_size=integer(text, "hidden_size"),
            intermediate_size=integer(text, "intermediate_size"),
            num_layers=integer(text, "num_hidden_layers"),
            num_heads=integer(text, "num_attention_heads"),
            num_kv_heads=integer(text, "num_key_value_heads"),
            head_dim=integer(text, "head_dim"),
            max_position_embeddings=integer(text, "max_position_embeddings"),
            norm_eps=number(text, "rms_norm_eps"),
            attention_bias=bool(text.get("attention_bias", False)),
            rope_theta=number(theta, "rope_theta"),
            mrope_section=_mrope_section(rope),
        )
        if config.num_heads % config.num_kv_heads:
            raise StartupError("config.json: `num_attention_heads` must be a multiple of `num_key_value_heads`.")
        if 2 * sum(config.mrope_section) != config.head_dim:
            raise StartupError(
                f"config.json: `mrope_section` {list(config.mrope_section)} must sum to half of `head_dim` "
                f"({config.head_dim // 2}), not {sum(config.mrope_section)}."
            )
        return config


def _mrope_section(rope: Mapping[str, Any]) -> tuple[int, int, int]:
    if rope.get("rope_type", "default") != "default":
        raise StartupError(f"config.json: rope type {rope['rope_type']!r} is not served.")
    if not rope.get("mrope_interleaved", False):
        raise StartupError("config.json: `mrope_interleaved` must be true for this network.")
    match rope.get("mrope_section"):
        case [int(time), int(height), int(width)] if min(time, height, width) >= 0:
            return time, height, width
        case given:
            raise StartupError(f"config.json: `mrope_section` must be three whole numbers, not {given!r}.")


class SelfAttention(nn.Module):
    """Queries, keys and values from one matrix; queries and keys normed per head, turned, attended."""

    def __init__(self, config: TextConfig, layer: int) -> None:
        super().__init__()
        head_dim, bias = config.head_dim, config.attention_bias
        self.norm_eps = config.norm_eps
        self.head_dim = head_dim
        widths = (config.num_heads * head_dim, config.num_kv_heads * head_dim, config.num_kv_heads * head_dim)
        self.qkv_proj = Linear(config.hidden_size, widths, bias)
        self.o_proj = Linear(config.num_heads * head_dim, config.hidden_size, bias)
        self.q_norm = RMSNorm(head_dim, config.norm_eps)
        self.k_norm = RMSNorm(head_dim, config.norm_eps)
        self.attention = Attention(layer, config.num_heads, config.num_kv_heads)
        self.qk_weight_HD = torch.empty(0)

    def join(self) -> None:
        """Lay the loaded norm weights of all heads side by side, so that one pass norms queries and keys."""
        num_heads, num_kv_heads = self.attention.num_heads, self.attention.num_kv_heads
        q_HD, k_HD = self.q_norm.weight.expand(num_heads, -1), self.k_norm.weight.expand(num_kv_heads, -1)
        self.qk_weight_HD = torch.cat((q_HD, k_HD))

    def add_to(
        self, residual_NE: torch.Tensor, x_NE: torch.Tensor, turn: Turn, context: ForwardContext
    ) -> torch.Tensor:
        """Attend over *x_NE*, and return the residual plus what came of it."""
        qkv_NHD = self.qkv_proj(x_NE).view(x_NE.shape[0], -1, self.head_dim)
        num_kv_heads = self.attention.num_kv_heads
        q_NQD, k_NKD = context.backend.norm_rotate(qkv_NHD, self.qk_weight_HD, self.norm_eps, turn, num_kv_heads)
        attended = self.attention(q_NQD, k_NKD, qkv_NHD[:, -num_kv_heads:], context)
        return self.o_proj.add_to(residual_NE, attended)


class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up from one matrix (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, (config.intermediate_size, config.intermediate_size), bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def add_to(self, residual_NE: torch.Tensor, x_NE: torch.Tensor, backend: Backend) -> torch.Tensor:
        """Return *residual_NE* plus what came of *x_NE*."""
        return self.down_proj.add_to(residual_NE, backend.gate(self.gate_up_proj(x_NE)))


class DecoderLayer(nn.Module):
    """Attention and MLP, each on a normed input and added back."""

    def __init__(self, config: TextConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = SelfAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = Mlp(config)

    def forward(self, x_NE: torch.Tensor, turn: Turn, context: ForwardContext) -> torch.Tensor:
        """Map [N, E] to [N, E]."""
        backend = context.backend
        x_NE = self.self_attn.add_to(x_NE, self.input_layernorm(x_NE, backend), turn, context)
        return self.mlp.add_to(x_NE, self.post_attention_layernorm(x_NE, backend), backend)


class TextDecoder(nn.Module):
    """Embeddings to hidden states. Extra features may be added behind the first layers, at chosen rows."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Module()
        self.embed_tokens.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size), requires_grad=False)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.axes = self.frequencies = torch.empty(0)

    @property
    def embedding_VE(self) -> torch.Tensor:
        """The embedding table; tied networks use it for logits too."""
        return self.embed_tokens.weight  # type: ignore[return-value]

    def finish(self) -> None:
        """Make what is derived from loaded weights and the device they are on."""
        device = self.embedding_VE.device
        self.axes = torch.tensor(interleaved_axes(self.config.mrope_section), device=device)
        self.frequencies = inverse_frequencies(self.config.rope_theta, self.config.head_dim, device)
        for layer in self.layers:
            layer.self_attn.join()  # type: ignore[union-attr,operator]

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Map ids int64 [N] to [N, E]."""
        return self.embedding_VE.index_select(0, input_ids)

    def forward(
        self,
        x_NE: torch.Tensor,
        context: ForwardContext,
        rows: torch.Tensor | None = None,
        features: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        """Return normed hidden states [N, E]; features[i] is added at *rows* behind layer i."""
        # Each channel is turned by one of the three axes.
        angles = context.positions.index_select(0, self.axes).t() * self.frequencies
        turn = rotation(angles, x_NE.dtype)
        for index, layer in enumerate(self.layers):
            x_NE = layer(x_NE, turn, context)
            if rows is not None and index < len(features):
                x_NE.index_add_(0, rows, features[index])
        return self.norm(x_NE, context.backend)  # type: ignore[no-any-return]

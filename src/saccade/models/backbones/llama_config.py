"""The config.json of decoders like Llama's (Llama, Mistral, Phi-3), checked. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from saccade.errors import StartupError
from saccade.models.backbones.model_config import choice, integer, number
from saccade.models.backbones.rope_scaling import Rope, read_rope
from saccade.models.spec import Paged

COMMON: Mapping[str, Any] = MappingProxyType({"hidden_act": "silu", "rope_theta": 10000.0})
"""The common defaults of transformers' LlamaConfig, MistralConfig and Phi3Config."""

LLAMA: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
    }
)
"""The defaults of a Llama's text_config: transformers, LlamaConfig."""


@dataclass(frozen=True)
class LlamaTextConfig:
    """The decoder's part of config.json, checked.

    *sliding_window* is the number of tokens, including itself, that a token attends to; None if no sequence is longer.
    *tied*: the embedding table is also the matrix of the logits.
    """

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
    mlp_bias: bool
    sliding_window: int | None
    rope: Rope
    tied: bool

    @classmethod
    def read(
        cls, text: Mapping[str, Any], defaults: Mapping[str, Any] = COMMON, max_model_len: int | None = None
    ) -> "LlamaTextConfig":
        """Read the object *text*; *defaults* are values for keys that it lacks. Raises StartupError, naming the key.

        *max_model_len* is the length of the longest sequence to serve, None that of the model. See read_rope.
        """
        text = {**COMMON, **defaults, **text}
        choice(text, "hidden_act", ("silu",))
        hidden_size, num_heads = integer(text, "hidden_size"), integer(text, "num_attention_heads")
        num_kv_heads = _or(text, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise StartupError("config.json: `num_attention_heads` must be a multiple of `num_key_value_heads`.")
        head_dim = _or(text, "head_dim", hidden_size // num_heads)
        if head_dim % 2:
            raise StartupError(f"config.json: a head must have an even number of channels, not {head_dim}.")
        max_position_embeddings = integer(text, "max_position_embeddings")
        window = _or(text, "sliding_window", max_position_embeddings)
        return cls(
            vocab_size=integer(text, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=integer(text, "intermediate_size"),
            num_layers=integer(text, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=max_position_embeddings,
            norm_eps=number(text, "rms_norm_eps"),
            attention_bias=bool(text.get("attention_bias", False)),
            mlp_bias=bool(text.get("mlp_bias", False)),
            sliding_window=window if window < max_position_embeddings else None,
            rope=read_rope(text, head_dim, max_model_len or max_position_embeddings),
            tied=bool(text.get("tie_word_embeddings", False)),
        )

    @property
    def kv_specs(self) -> tuple[Paged, ...]:
        """Return paged attention for every layer."""
        return (Paged(self.num_kv_heads, self.head_dim, self.head_dim),) * self.num_layers


def _or(text: Mapping[str, Any], key: str, otherwise: int) -> int:
    """Return the whole number under *key*, *otherwise* if it is null or missing."""
    return otherwise if text.get(key) is None else integer(text, key)

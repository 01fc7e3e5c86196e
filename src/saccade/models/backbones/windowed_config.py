"""Reads and checks the configuration of Gemma 3's text decoder. Does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, Self

from saccade.errors import StartupError
from saccade.models.backbones.layer_types import FULL, SLIDING, check_has_full, layer_types
from saccade.models.backbones.model_config import choice, integer, number, part, values_of
from saccade.models.backbones.rope_scaling import Rope, read_rope
from saccade.models.backbones.text_config import DecoderConfig, TextStyle
from saccade.models.spec import KvSpec, Paged

PATTERN = "sliding_window_pattern"
ACTIVATION = "gelu_pytorch_tanh"
STYLE = TextStyle(
    MappingProxyType(
        {
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_activation": ACTIVATION,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-6,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            PATTERN: 6,
        }
    )
)
"""The defaults of transformers' configuration of this decoder."""

THETAS: Mapping[str, tuple[str, float]] = MappingProxyType(
    {FULL: ("rope_theta", 1_000_000.0), SLIDING: ("rope_local_base_freq", 10_000.0)}
)
"""The key of each kind of layers' base in older files, and its default."""

UNSERVED = ("use_bidirectional_attention", "attn_logit_softcapping", "final_logit_softcapping")
"""Keys that no release of this decoder sets."""


class LayerKind(NamedTuple):
    """The attention of one kind of layer. *window* is None for layers that attend to all tokens."""

    window: int | None
    rope: Rope


@dataclass(frozen=True, kw_only=True)
class WindowedConfig(DecoderConfig):
    """The decoder's configuration. *kinds* holds each layer's attention. Scores are multiplied by *score_scale*."""

    num_kv_heads: Annotated[int, "num_key_value_heads"]
    head_dim: Annotated[int, "head_dim"]
    score_scale: float
    kinds: tuple[LayerKind, ...]

    @classmethod
    def read_decoder(cls, text: Mapping[str, Any], style: TextStyle = STYLE, max_model_len: int | None = None) -> Self:
        text = {**style.defaults, **text}
        choice(text, "hidden_activation", (ACTIVATION,))
        return cls(style=style, **values_of(cls, text), **cls.more(text, style, max_model_len))

    @classmethod
    def more(cls, text: Mapping[str, Any], style: TextStyle, max_model_len: int | None) -> dict[str, Any]:
        for key in UNSERVED:
            if text.get(key):
                raise StartupError(f"config.json: `{key}` is {text[key]!r}; this network knows only null.")
        if integer(text, "num_attention_heads") % integer(text, "num_key_value_heads") or integer(text, "head_dim") % 2:
            raise StartupError(
                "config.json: `num_attention_heads` must be a multiple of `num_key_value_heads`, and a head must have "
                "an even number of channels."
            )
        kinds = {
            SLIDING: LayerKind(integer(text, "sliding_window"), _rope(text, SLIDING, max_model_len)),
            FULL: LayerKind(None, _rope(text, FULL, max_model_len)),
        }
        types = layer_types(text, SLIDING, lambda: integer(text, PATTERN))
        check_has_full(types)
        return {
            "max_position_embeddings": integer(text, "max_position_embeddings"),
            "rope": kinds[FULL].rope,
            "score_scale": number(text, "query_pre_attn_scalar") ** -0.5,
            "kinds": tuple(kinds[name] for name in types),
        }

    @property
    def kv_specs(self) -> tuple[KvSpec, ...]:
        """Paged attention for every layer."""
        return tuple(Paged(self.num_kv_heads, self.head_dim, self.head_dim, kind.window) for kind in self.kinds)


def _rope(text: Mapping[str, Any], name: str, max_model_len: int | None) -> Rope:
    """Return the rotary frequencies of one kind of layer.

    Newer files have parameters for each kind. Older ones have two bases, and one scaling for the layers that attend to
    all tokens. If a file has both, that scaling is added to the parameters.
    """
    parameters = part(text, "rope_parameters")
    if not set(parameters) <= {SLIDING, FULL}:
        raise StartupError(
            f"config.json: `rope_parameters` must have {SLIDING} and {FULL}, not {', '.join(map(str, parameters))}."
        )
    own = {**part(parameters, name), **(part(text, "rope_scaling") if name == FULL else {})}
    key, theta = THETAS[name]
    keys = {
        "rope_theta": text.get(key, theta),
        "rope_parameters": own,
        "max_position_embeddings": text["max_position_embeddings"],
    }
    head_dim, longest = integer(text, "head_dim"), integer(text, "max_position_embeddings")
    return read_rope(keys, head_dim, max_model_len or longest)

"""Reads and checks the config.json of text decoders: one reader, and a table of the differences between styles.

Does not import torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, Self

from saccade.errors import StartupError
from saccade.models.backbones import text_defaults
from saccade.models.backbones.layer_types import FULL, LINEAR, check_has_full, check_window, layer_types
from saccade.models.backbones.model_config import check_equal, choice, flag, integer, number, part, values_of
from saccade.models.backbones.rope_scaling import (
    Rope,
    longest,
    original_length,
    read_rope,
    rope_section,
)
from saccade.models.spec import NETWORK_DTYPE, HeadCut, KvSpec, Paged, Recurrent

NORMALISED: Mapping[str, Any] = MappingProxyType({"norm_topk_prob": True})
"""The reference of some decoders always normalises the weights of experts; vLLM does as the key says."""

TIED: Mapping[str, Any] = MappingProxyType({"tie_word_embeddings": True})
"""Of a top level that ties head and embedding unless config.json says otherwise: the default of some classes."""

SHARED_WIDTH = "shared_expert_intermediate_size"


class TextStyle(NamedTuple):
    """An architecture's properties that config.json does not state, and *defaults* for keys that it leaves out.

    *fixed* has keys with a single supported value, which the reference ignores but other programs obey. *normed_heads*:
    queries and keys are normalised per head. *qkv_bias*: queries, keys and values have biases. *has_window*:
    `sliding_window` applies. *axes*: how M-RoPE's axes divide the channels, or None for positions on one axis;
    *mrope_section* applies if config.json has none. *rotary_factor* is the share of a head's channels that is rotated
    if config.json does not say, or None for decoders that support only 1. *scales_queries*: queries are scaled up as
    their positions grow.
    """

    defaults: Mapping[str, Any] = text_defaults.COMMON
    fixed: Mapping[str, Any] = MappingProxyType({})
    normed_heads: bool = False
    qkv_bias: bool = False
    has_window: bool = False
    axes: Literal["chunked", "interleaved"] | None = None
    mrope_section: tuple[int, int, int] | None = None
    rotary_factor: float | None = None
    scales_queries: bool = False


PHI3 = TextStyle(text_defaults.PHI3, has_window=True)
LLAMA = TextStyle(text_defaults.LLAMA)
MISTRAL = TextStyle(text_defaults.MISTRAL, has_window=True)
MINISTRAL = TextStyle(text_defaults.MINISTRAL, has_window=True, scales_queries=True)
QWEN2 = TextStyle(text_defaults.QWEN2, qkv_bias=True)
QWEN3 = TextStyle(text_defaults.QWEN3, normed_heads=True)
QWEN3_MOE = QWEN3._replace(defaults=text_defaults.QWEN3_MOE)
HYBRID = TextStyle(text_defaults.HYBRID, normed_heads=True, rotary_factor=0.25)
HYBRID_EXPERTS = HYBRID._replace(defaults=text_defaults.HYBRID_EXPERTS, fixed=NORMALISED)
DEEPSEEK = TextStyle(text_defaults.DEEPSEEK)


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The settings that all decoders have."""

    vocab_size: Annotated[int, "vocab_size"]
    hidden_size: Annotated[int, "hidden_size"]
    intermediate_size: Annotated[int, "intermediate_size"]
    num_layers: Annotated[int, "num_hidden_layers"]
    num_heads: Annotated[int, "num_attention_heads"]
    norm_eps: Annotated[float, "rms_norm_eps"]
    attention_bias: Annotated[bool, "attention_bias"]
    tied: Annotated[bool, "tie_word_embeddings"]
    "The embedding table is also the matrix of the logits."
    max_position_embeddings: int
    rope: Rope
    style: TextStyle
    mrope_section: tuple[int, int, int] | None = None

    @classmethod
    def read_decoder(cls, text: Mapping[str, Any], style: TextStyle, max_model_len: int | None = None) -> Self:
        """Read the decoder's keys *text*. Raises a StartupError that names the key.

        *max_model_len* is the length of the longest sequence to serve, or None for the model's own. See read_rope.
        """
        text = {**style.defaults, **text}
        if text.get("rope_parameters") is None and "rope_parameters" in style.defaults:
            text["rope_parameters"] = style.defaults["rope_parameters"]
        check_equal(text, style.fixed)
        choice(text, "hidden_act", ("silu",))
        return cls(style=style, **values_of(cls, text), **cls.more(text, style, max_model_len))

    @classmethod
    def more(cls, text: Mapping[str, Any], style: TextStyle, max_model_len: int | None) -> dict[str, Any]:
        """Return the fields that are not annotated with a key. Raises a StartupError that names the key."""
        raise NotImplementedError

    def rope_of(self, layer: int) -> Rope:
        """Return the rotary frequencies of *layer*."""
        return self.rope

    @property
    def kv_specs(self) -> tuple[KvSpec, ...]:
        """The kind of state that each layer keeps for a sequence."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts: in layers with experts, *num_chosen* of *num_experts* MLPs process each token.

    *layers* are the indices of these layers; the others have a dense MLP. With *normalised*, the weights of the chosen
    experts sum to 1.
    """

    num_experts: int
    num_chosen: Annotated[int, "num_experts_per_tok"]
    intermediate_size: Annotated[int, "moe_intermediate_size"]
    normalised: bool
    layers: frozenset[int]

    @classmethod
    def read_experts(cls, text: Mapping[str, Any]) -> "ExpertsConfig | None":
        """Read the decoder's keys; return None for a dense model. Raises a StartupError that names the key."""
        # transformers reads the first name before the second.
        key = next((key for key in ("num_local_experts", "num_experts") if key in text), "")
        if not text.get(key):
            return None
        step = integer(text, "decoder_sparse_step")
        dense = text.get("mlp_only_layers") or []
        layers = range(integer(text, "num_hidden_layers"))
        config = cls(
            num_experts=integer(text, key),
            normalised=flag(text, "norm_topk_prob"),
            layers=frozenset(layer for layer in layers if layer not in dense and (layer + 1) % step == 0),
            **values_of(cls, text),
        )
        if config.num_chosen > config.num_experts:
            raise StartupError(f"config.json: `num_experts_per_tok` must be at most `{key}`, {config.num_experts}.")
        return config


class QueryScaling(NamedTuple):
    """Queries at position p are multiplied by 1 + *beta* * log(1 + floor(p / *length*)).

    *length* is the sequence length in training.
    """

    beta: float
    length: int


@dataclass(frozen=True, kw_only=True)
class TextConfig(DecoderConfig):
    """A decoder with grouped-query attention. With *attention_bias*, all four attention matrices have biases.

    *sliding_window* is the number of tokens, including itself, that a token attends to; None if no sequence is longer.
    """

    mlp_bias: Annotated[bool, "mlp_bias"]
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None
    experts: ExpertsConfig | None
    query_scaling: QueryScaling | None = None

    @classmethod
    def more(cls, text: Mapping[str, Any], style: TextStyle, max_model_len: int | None) -> dict[str, Any]:
        if text.get("use_sliding_window"):
            raise StartupError("config.json: `use_sliding_window` is true; this network attends to all tokens only.")
        num_heads = integer(text, "num_attention_heads")
        num_kv_heads = _or(text, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise StartupError("config.json: `num_attention_heads` must be a multiple of `num_key_value_heads`.")
        head_dim = _head_dim(text, num_heads, style)
        max_positions = longest(text)
        window = _or(text, "sliding_window", max_positions) if style.has_window else max_positions
        check_window(text, is_in_all=style.has_window and text.get("sliding_window") is not None)
        rope = read_rope(text, head_dim, max_model_len or max_positions, _rotary_factor(text, style))
        return {
            "max_position_embeddings": max_positions,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "sliding_window": window if window < max_positions else None,
            "rope": rope,
            "mrope_section": _mrope_section(text, style, len(rope.divisors)),
            "experts": ExpertsConfig.read_experts(text),
            "query_scaling": _query_scaling(text) if style.scales_queries else None,
        }

    @property
    def kv_specs(self) -> tuple[KvSpec, ...]:
        """Paged attention for every layer."""
        return (Paged(self.num_kv_heads, self.head_dim, self.head_dim),) * self.num_layers


def text_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text model's keys: `text_config`, or all of an older, flat config.json. Raises StartupError.

    A top-level `tie_word_embeddings` takes precedence over the one in `text_config`.
    """
    text = config if config.get("text_config") is None else part(config, "text_config")
    tied = "tie_word_embeddings"
    return {**text, tied: bool(config.get(tied, text.get(tied, False)))}


def _or(text: Mapping[str, Any], key: str, otherwise: int) -> int:
    """Return the whole number under *key*, or *otherwise* if it is null or missing."""
    return otherwise if text.get(key) is None else integer(text, key)


def _head_dim(text: Mapping[str, Any], num_heads: int, style: TextStyle) -> int:
    if text.get("head_dim") is not None:
        head_dim = integer(text, "head_dim")
    else:
        head_dim, rest = divmod(integer(text, "hidden_size"), num_heads)
        if rest:
            raise StartupError("config.json: `hidden_size` must be a multiple of `num_attention_heads`.")
    if head_dim % 2:
        raise StartupError(f"config.json: a head must have an even number of channels, not {head_dim}.")
    return head_dim


def _rotary_factor(text: Mapping[str, Any], style: TextStyle) -> float:
    if style.rotary_factor is None:
        return 1.0
    key = "partial_rotary_factor"
    return number({key: style.rotary_factor, **text, **rope_section(text)}, key)


def _query_scaling(text: Mapping[str, Any]) -> QueryScaling:
    return QueryScaling(number(rope_section(text), "llama_4_scaling_beta"), original_length(text))


def _mrope_section(text: Mapping[str, Any], style: TextStyle, num_pairs: int) -> tuple[int, int, int] | None:
    """Return the number of channel pairs for each of M-RoPE's axes, *num_pairs* in all; None for one axis."""
    if style.axes is None:
        return None
    rope, interleaved = rope_section(text), style.axes == "interleaved"
    if bool(rope.get("mrope_interleaved", interleaved)) != interleaved:
        raise StartupError(f"config.json: `mrope_interleaved` must be {str(interleaved).lower()} for this network.")
    match rope.get("mrope_section", style.mrope_section):
        case [int(time), int(height), int(width)] if min(time, height, width) >= 0:
            if (total := time + height + width) != num_pairs:
                raise StartupError(
                    f"config.json: `mrope_section` {[time, height, width]} must sum to half of the rotated channels "
                    f"of `head_dim` ({num_pairs}), not {total}."
                )
            return time, height, width
        case given:
            raise StartupError(f"config.json: `mrope_section` must be three whole numbers, not {given!r}.")


@dataclass(frozen=True)
class DeltaNetConfig:
    """The settings of gated delta nets. Each key head serves the same number of value heads."""

    num_key_heads: Annotated[int, "linear_num_key_heads"]
    num_value_heads: Annotated[int, "linear_num_value_heads"]
    key_width: Annotated[int, "linear_key_head_dim"]
    value_width: Annotated[int, "linear_value_head_dim"]
    num_taps: Annotated[int, "linear_conv_kernel_dim"]

    @classmethod
    def read_delta_net(cls, text: Mapping[str, Any]) -> "DeltaNetConfig":
        """Read the decoder's keys. Raises a StartupError that names the key."""
        integer(text, "linear_conv_kernel_dim", least=2)
        config = cls(**values_of(cls, text))
        if config.num_value_heads % config.num_key_heads:
            raise StartupError("config.json: `linear_num_value_heads` must be a multiple of `linear_num_key_heads`.")
        return config

    @property
    def heads(self) -> tuple[int, int, int]:
        """The numbers of heads for queries, keys and values."""
        return self.num_key_heads, self.num_key_heads, self.num_value_heads

    @property
    def widths(self) -> tuple[int, int, int]:
        """The numbers of channels for queries, keys and values."""
        keys = self.num_key_heads * self.key_width
        return keys, keys, self.num_value_heads * self.value_width

    @property
    def state(self) -> Recurrent:
        """A layer's state for a sequence: the delta rule's state, and the convolution's last inputs."""
        rule = (self.num_value_heads, self.key_width, self.value_width)
        inputs = (self.num_taps - 1, sum(self.widths))
        parts = tuple((heads, width // heads) for heads, width in zip(self.heads, self.widths, strict=True))
        cuts = (HeadCut(0, ((self.num_value_heads, 1),)), HeadCut(1, parts))
        return Recurrent((rule, inputs), ("float32", NETWORK_DTYPE), cuts)


@dataclass(frozen=True, kw_only=True)
class HybridConfig(TextConfig):
    """A hybrid decoder. *full_attention* holds the layers that attend to all tokens.

    Every other layer keeps a recurrent state, which *delta_net* describes.

    With experts, *intermediate_size* is the shared expert's. With *drafts*, the network has the release's draft layer.
    """

    delta_net: DeltaNetConfig
    full_attention: frozenset[int]
    drafts: bool = False

    @classmethod
    def read_decoder(cls, text: Mapping[str, Any], style: TextStyle, max_model_len: int | None = None) -> Self:
        text = {**style.defaults, **text}
        if not text["attn_output_gate"]:
            raise StartupError("config.json: `attn_output_gate` is false; this network has an output gate.")
        if SHARED_WIDTH in text:
            text = {**text, "intermediate_size": integer(text, SHARED_WIDTH)}
        return super().read_decoder(text, style, max_model_len)

    @classmethod
    def more(cls, text: Mapping[str, Any], style: TextStyle, max_model_len: int | None) -> dict[str, Any]:
        own = {"delta_net": DeltaNetConfig.read_delta_net(text), "full_attention": _full_attention(text)}
        return {**super().more(text, style, max_model_len), **own}

    @property
    def kv_specs(self) -> tuple[KvSpec, ...]:
        """Paged attention for some layers, and a recurrent state for the others.

        The draft layer has both. Its state holds the hidden state and position of the sequence's last token; the
        position's floats are exact up to 2**24.
        """
        paged, recurrent = Paged(self.num_kv_heads, self.head_dim, self.head_dim), self.delta_net.state
        layers = tuple(paged if layer in self.full_attention else recurrent for layer in range(self.num_layers))
        last = Recurrent(((self.hidden_size,), (3,)), (NETWORK_DTYPE, "float32"))
        return (*layers, paged, last) if self.drafts else layers


def _full_attention(text: Mapping[str, Any]) -> frozenset[int]:
    types = layer_types(text, LINEAR, lambda: integer(text, "full_attention_interval"))
    check_has_full(types)
    return frozenset(layer for layer, kind in enumerate(types) if kind == FULL)

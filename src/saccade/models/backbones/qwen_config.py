"""Qwen's config.json, checked, for networks and specs. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from saccade.errors import StartupError
from saccade.models.backbones.model_config import choice, integer, number, section
from saccade.models.backbones.rope_scaling import Rope, longest, read_rope, rope_section
from saccade.models.spec import KvSpec, Paged

ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "quick_gelu", "silu")


class TextStyle(NamedTuple):
    """Properties of an architecture that config.json does not have.

    *normed_heads*: queries and keys are normalised per head, and config.json names the head size. *qkv_bias*: queries,
    keys and values have biases. *interleaved_axes*: the channels of M-RoPE's axes alternate. *mrope_section* applies
    if config.json has none.
    """

    normed_heads: bool = True
    qkv_bias: bool = False
    interleaved_axes: bool = True
    mrope_section: tuple[int, int, int] | None = (24, 20, 20)


NORMED_STYLE = TextStyle()
"""The style of Qwen3."""
BIASED_STYLE = TextStyle(normed_heads=False, qkv_bias=True, interleaved_axes=False, mrope_section=None)
"""The style of Qwen2."""


def text_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text model's keys: `text_config`, or all of an older, flat config.json. Raises StartupError."""
    return section(config, "text_config") if "text_config" in config else config


@dataclass(frozen=True)
class ExpertsConfig:
    """Mixture of experts: of *num_experts* MLPs, *num_chosen* compute each token in the layers with such an MLP.

    *layers* are the indices of these layers; the others have a dense MLP. With *normalised*, the weights of the chosen
    experts sum to 1.
    """

    num_experts: int
    num_chosen: int
    intermediate_size: int
    normalised: bool
    layers: frozenset[int]

    @classmethod
    def read(cls, text: Mapping[str, Any]) -> "ExpertsConfig | None":
        """Read `text_config`; None for a dense model. Raises StartupError, naming the key."""
        key = next((key for key in ("num_experts", "num_local_experts") if text.get(key)), None)
        if key is None:
            return None
        step = integer({"decoder_sparse_step": 1, **text}, "decoder_sparse_step")
        dense = text.get("mlp_only_layers") or []
        layers = range(integer(text, "num_hidden_layers"))
        config = cls(
            num_experts=integer(text, key),
            num_chosen=integer(text, "num_experts_per_tok"),
            intermediate_size=integer(text, "moe_intermediate_size"),
            normalised=bool(text.get("norm_topk_prob", True)),
            layers=frozenset(layer for layer in layers if layer not in dense and (layer + 1) % step == 0),
        )
        if config.num_chosen > config.num_experts:
            raise StartupError(f"config.json: `num_experts_per_tok` must be at most `{key}`, {config.num_experts}.")
        return config


@dataclass(frozen=True)
class QwenTextConfig:
    """The text half of config.json, checked. *attention_bias*: all four matrices of the attention have biases."""

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
    rope: Rope
    mrope_section: tuple[int, int, int]
    style: TextStyle = NORMED_STYLE
    experts: ExpertsConfig | None = None

    @classmethod
    def read(cls, text: Mapping[str, Any], style: TextStyle = NORMED_STYLE) -> "QwenTextConfig":
        """Read the text model's keys. Raises StartupError, naming the key."""
        choice(text, "hidden_act", ("silu",))
        if text.get("use_sliding_window"):
            raise StartupError("config.json: `use_sliding_window` is true; this network attends to all tokens only.")
        num_heads = integer(text, "num_attention_heads")
        head_dim = integer(text, "head_dim") if style.normed_heads else _even_share(text, num_heads)
        max_positions, rotary_factor = (
            longest(text),
            number({"partial_rotary_factor": 1.0, **rope_section(text)}, "partial_rotary_factor"),
        )
        config = cls(
            vocab_size=integer(text, "vocab_size"),
            hidden_size=integer(text, "hidden_size"),
            intermediate_size=integer(text, "intermediate_size"),
            num_layers=integer(text, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=integer(text, "num_key_value_heads"),
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            norm_eps=number(text, "rms_norm_eps"),
            attention_bias=bool(text.get("attention_bias", False)),
            rope=read_rope(text, head_dim, max_positions, rotary_factor),
            mrope_section=_mrope_section(rope_section(text), style),
            style=style,
            experts=ExpertsConfig.read(text),
        )
        if config.num_heads % config.num_kv_heads:
            raise StartupError("config.json: `num_attention_heads` must be a multiple of `num_key_value_heads`.")
        if sum(config.mrope_section) != len(config.rope.divisors):
            raise StartupError(
                f"config.json: `mrope_section` {list(config.mrope_section)} must sum to half of the rotated "
                f"channels of `head_dim` ({len(config.rope.divisors)}), not {sum(config.mrope_section)}."
            )
        return config

    @property
    def kv_specs(self) -> tuple[KvSpec, ...]:
        """Return paged attention for every layer."""
        return (Paged(self.num_kv_heads, self.head_dim, self.head_dim),) * self.num_layers


def _even_share(text: Mapping[str, Any], num_heads: int) -> int:
    """Return the head size of a model whose heads share the hidden size."""
    hidden_size = integer(text, "hidden_size")
    if hidden_size % num_heads:
        raise StartupError("config.json: `hidden_size` must be a multiple of `num_attention_heads`.")
    return hidden_size // num_heads


def _mrope_section(rope: Mapping[str, Any], style: TextStyle) -> tuple[int, int, int]:
    interleaved = style.interleaved_axes
    if bool(rope.get("mrope_interleaved", interleaved and "mrope_section" not in rope)) != interleaved:
        raise StartupError(f"config.json: `mrope_interleaved` must be {str(interleaved).lower()} for this network.")
    match rope.get("mrope_section", style.mrope_section):
        case [int(time), int(height), int(width)] if min(time, height, width) >= 0:
            return time, height, width
        case given:
            raise StartupError(f"config.json: `mrope_section` must be three whole numbers, not {given!r}.")


@dataclass(frozen=True)
class TowerConfig:
    """The vision half of config.json, checked: the fields of all towers."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    patch_size: int
    merge_size: int
    temporal_patch_size: int
    channels: int
    activation: str

    @classmethod
    def read(cls, vision: Mapping[str, Any]) -> Self:
        """Read `vision_config`. Raises StartupError, naming the key."""
        config = cls(
            depth=integer(vision, "depth"),
            hidden_size=integer(vision, "hidden_size"),
            intermediate_size=integer(vision, "intermediate_size"),
            num_heads=integer(vision, "num_heads"),
            out_hidden_size=integer(vision, "out_hidden_size"),
            patch_size=integer(vision, "patch_size"),
            merge_size=integer(vision, "spatial_merge_size"),
            temporal_patch_size=integer(vision, "temporal_patch_size"),
            channels=integer(vision, "in_channels"),
            activation=choice(vision, "hidden_act", ACTIVATIONS),
            **cls.more(vision),
        )
        if config.hidden_size % (4 * config.num_heads):
            raise StartupError("config.json: the vision tower's width must be a multiple of 4 * `num_heads`.")
        return config

    @classmethod
    def more(cls, vision: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that a subclass adds. Raises StartupError, naming the key."""
        return {}

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.hidden_size // self.num_heads

    @property
    def patch_values(self) -> int:
        """Values of one patch of one frame."""
        return self.channels * self.patch_size * self.patch_size

    @property
    def num_features(self) -> int:
        """Vectors of the text model's width that each token of an image has."""
        return 1


@dataclass(frozen=True)
class VisionConfig(TowerConfig):
    """A tower with side * side learned positions. *deepstack_layers* are the blocks whose output is merged as well."""

    side: int
    deepstack_layers: tuple[int, ...]

    @classmethod
    def more(cls, vision: Mapping[str, Any]) -> dict[str, Any]:
        num_positions = integer(vision, "num_position_embeddings")
        side = round(num_positions**0.5)
        if side * side != num_positions:
            raise StartupError(f"config.json: `num_position_embeddings` must be a square, not {num_positions}.")
        return {"side": side, "deepstack_layers": _deepstack_layers(vision)}

    @property
    def num_features(self) -> int:
        return 1 + len(self.deepstack_layers)


def _deepstack_layers(vision: Mapping[str, Any]) -> tuple[int, ...]:
    layers = vision.get("deepstack_visual_indexes")
    depth = integer(vision, "depth")
    if not isinstance(layers, list) or not all(isinstance(layer, int) and 0 <= layer < depth for layer in layers):
        raise StartupError(
            f"config.json: `deepstack_visual_indexes` must list blocks of the vision tower (0 to {depth - 1}), "
            f"not {layers!r}; [] means none."
        )
    return tuple(layers)

"""Reads the text and image configuration from config.json, and the spec for the engine's core.

Does not import torch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, NamedTuple, Self

from saccade.errors import StartupError
from saccade.models.backbones.grid_spec import MergedPatchSpec, placeholders
from saccade.models.backbones.layer_types import FULL, SLIDING, layer_types
from saccade.models.backbones.model_config import choice, flag, integer, number, section, values_of
from saccade.models.backbones.rope_scaling import Rope
from saccade.models.backbones.text_config import TIED, DecoderConfig, TextStyle, text_section
from saccade.models.gemma4 import BUDGETS
from saccade.models.gemma4.layer_sizes import LayerSizes, layer_sizes
from saccade.models.spec import Grid, KvSpec, Paged

SLIDING_INTERVAL = 6
"""By default, every sixth layer attends to all tokens."""

ACTIVATION = "gelu_pytorch_tanh"
ROPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    }
)
TEXT_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 262_144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": ACTIVATION,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "sliding_window": 512,
        "vocab_size_per_layer_input": 262_144,
        "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": 0,
        "pad_token_id": 0,
    }
)
"""The defaults of transformers' Gemma4TextConfig, with those of missing keys of the rotary positions in ROPES."""

VISION_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 16,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "head_dim": 64,
        "hidden_activation": ACTIVATION,
        "rms_norm_eps": 1e-6,
        "pooling_kernel_size": 3,
        "patch_size": 16,
        "position_embedding_size": 10 * 1024,
        "rope_parameters": {"rope_theta": 100.0},
    }
)
"""The defaults of transformers' Gemma4VisionConfig."""

UNIFIED_VISION_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "mm_embed_dim": 3840,
        "mm_posemb_size": 1120,
        "output_proj_dims": 3840,
        "patch_size": 16,
        "pooling_kernel_size": 3,
        "rms_norm_eps": 1e-6,
    }
)
"""The defaults of transformers' Gemma4UnifiedVisionConfig."""

STYLE = TextStyle(TEXT_DEFAULTS)
UNIFIED_STYLE = TextStyle(
    MappingProxyType(
        {
            **TEXT_DEFAULTS,
            "max_position_embeddings": 262_144,
            "sliding_window": 1024,
            "use_bidirectional_attention": "vision",
            "hidden_size_per_layer_input": 0,
        }
    )
)
"""The defaults of transformers' Gemma4UnifiedTextConfig."""


class LayerKind(NamedTuple):
    """The attention of one kind of layer. *window* is None for layers that attend to all tokens.

    With *keys_are_values*, one matrix computes both keys and values.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None
    rope: Rope
    keys_are_values: bool


class GemmaExperts(NamedTuple):
    """A mixture of experts: *num_chosen* of *num_experts* MLPs process each token, alongside the dense MLP."""

    num_experts: int
    num_chosen: int
    intermediate_size: int


@dataclass(frozen=True, kw_only=True)
class GemmaText(DecoderConfig):
    """The decoder's configuration. *kinds* holds the attention of each layer.

    The last *num_shared* layers have no keys and values of their own. They attend to those of the last layer of their
    kind that has its own; with *double_wide*, their MLP has twice the width. *per_layer_width* is the width of each
    layer's own embeddings, or 0 if there are none. Their table has *per_layer_vocab* rows; placeholders use the row of
    *pad_token_id*. With *sees_images*, an image's tokens see its later tokens in sliding-window layers.
    """

    sliding_window: Annotated[int, "sliding_window"]
    per_layer_vocab: Annotated[int, "vocab_size_per_layer_input"]
    double_wide: Annotated[bool, "use_double_wide_mlp"]
    per_layer_width: int
    pad_token_id: int
    num_shared: int
    kinds: tuple[LayerKind, ...]
    experts: GemmaExperts | None
    soft_cap: float | None
    sees_images: bool

    @classmethod
    def read_decoder(cls, text: Mapping[str, Any], style: TextStyle = STYLE, max_model_len: int | None = None) -> Self:
        text = {**style.defaults, **text}
        choice(text, "hidden_activation", (ACTIVATION,))
        return cls(style=style, **values_of(cls, text), **cls.more(text, style, max_model_len))

    @classmethod
    def more(cls, text: Mapping[str, Any], style: TextStyle, max_model_len: int | None) -> dict[str, Any]:
        layers = _layer_types(text)
        kinds = {name: _kind(text, name, sizes) for name, sizes in layer_sizes(text, layers).items()}
        num_shared = integer(text, "num_kv_shared_layers", least=0)
        if num_shared and set(layers[:-num_shared]) != set(layers):
            raise StartupError(
                "config.json: `num_kv_shared_layers` leaves no layer of some type with keys and values of its own."
            )
        sees = text.get("use_bidirectional_attention")
        if sees not in (None, "vision"):
            raise StartupError(
                f"config.json: `use_bidirectional_attention` is {sees!r}; this network knows 'vision' and null."
            )
        cap = text.get("final_logit_softcapping")
        return {
            "max_position_embeddings": integer(text, "max_position_embeddings"),
            "rope": kinds[FULL].rope,
            "kinds": tuple(kinds[name] for name in layers),
            "num_shared": num_shared,
            "per_layer_width": integer({**text, "per_layer": text["hidden_size_per_layer_input"] or 0}, "per_layer", 0),
            "pad_token_id": integer(text, "pad_token_id", least=0),
            "experts": _experts(text),
            "soft_cap": None if cap is None else number(text, "final_logit_softcapping"),
            "sees_images": sees == "vision",
        }

    def rope_of(self, layer: int) -> Rope:
        return self.kinds[layer].rope

    def cache_of(self, layer: int) -> int:
        """Return the layer whose keys and values *layer* attends to: itself, or the last of its kind that has any."""
        own = self.num_layers - self.num_shared
        return layer if layer < own else max(one for one in range(own) if self.kinds[one] == self.kinds[layer])

    @property
    def kv_specs(self) -> tuple[KvSpec, ...]:
        """Paged attention for every layer with keys and values of its own: all but the last *num_shared*."""
        own = self.kinds[: self.num_layers - self.num_shared]
        return tuple(Paged(kind.num_kv_heads, kind.head_dim, kind.head_dim, kind.window) for kind in own)


def _layer_types(text: Mapping[str, Any]) -> list[str]:
    # As in the reference, the last layer attends to all tokens.
    return [*layer_types(text, SLIDING, lambda: SLIDING_INTERVAL)[:-1], FULL]


def _kind(text: Mapping[str, Any], name: str, sizes: LayerSizes) -> LayerKind:
    head_dim, num_kv_heads = sizes
    if integer(text, "num_attention_heads") % num_kv_heads or head_dim % 2:
        raise StartupError(
            f"config.json: in layers of {name}, `num_attention_heads` must be a multiple of the heads of keys and "
            f"values, {num_kv_heads} (`num_key_value_heads`, `num_global_key_value_heads`), and a head must have an "
            "even number of channels."
        )
    is_full = name == FULL
    window = None if is_full else integer(text, "sliding_window")
    keys_are_values = is_full and flag(text, "attention_k_eq_v")
    return LayerKind(num_kv_heads, head_dim, window, _rope(text, name, head_dim), keys_are_values)


def _rope(text: Mapping[str, Any], name: str, head_dim: int) -> Rope:
    """Return the rotary frequencies of one kind of layer.

    If they are proportional, only the first pairs rotate, at the frequencies they would have if all pairs did.
    """
    parameters = section({"rope_parameters": ROPES, **text}, "rope_parameters").get(name) or ROPES[name]
    theta, pairs = number(parameters, "rope_theta"), head_dim // 2
    if choice({"rope_type": "default", **parameters}, "rope_type", ("default", "proportional")) == "default":
        return Rope(theta, (1.0,) * pairs)
    rotated = int(number({"partial_rotary_factor": 1.0, **parameters}, "partial_rotary_factor") * head_dim // 2)
    factor = number({"factor": 1.0, **parameters}, "factor")
    return Rope(theta, (factor,) * rotated + (math.inf,) * (pairs - rotated))


def _experts(text: Mapping[str, Any]) -> GemmaExperts | None:
    if not flag(text, "enable_moe_block"):
        return None
    experts = GemmaExperts(*(integer(text, key) for key in ("num_experts", "top_k_experts", "moe_intermediate_size")))
    if experts.num_chosen > experts.num_experts:
        raise StartupError(f"config.json: `top_k_experts` must be at most `num_experts`, {experts.num_experts}.")
    return experts


@dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """Image settings: *merge_size* x *merge_size* patches become one token, with *out_hidden_size* feature values."""

    norm_eps: Annotated[float, "rms_norm_eps"]
    merge_size: Annotated[int, "pooling_kernel_size"]
    patch_size: Annotated[int, "patch_size"]
    out_hidden_size: int
    temporal_patch_size: int = 1

    @classmethod
    def read_vision(cls, vision: Mapping[str, Any], out_hidden_size: int) -> Self:
        """Read `vision_config`. Raises a StartupError that names the key."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class GemmaVision(ImageConfig):
    """The vision tower's configuration. A token is the mean of its patches.

    With *clipped*, the matrices' inputs and outputs have bounds; with *standardised*, tokens have a bias and a scale.
    """

    hidden_size: Annotated[int, "hidden_size"]
    intermediate_size: Annotated[int, "intermediate_size"]
    depth: Annotated[int, "num_hidden_layers"]
    num_heads: Annotated[int, "num_attention_heads"]
    head_dim: Annotated[int, "head_dim"]
    table_size: Annotated[int, "position_embedding_size"]
    clipped: Annotated[bool, "use_clipped_linears"]
    standardised: Annotated[bool, "standardize"]
    theta: float

    @classmethod
    def read_vision(cls, vision: Mapping[str, Any], out_hidden_size: int) -> Self:
        vision = {**VISION_DEFAULTS, **vision}
        choice(vision, "hidden_activation", (ACTIVATION,))
        theta = number(section(vision, "rope_parameters"), "rope_theta")
        config = cls(theta=theta, out_hidden_size=out_hidden_size, **values_of(cls, vision))
        if integer(vision, "num_key_value_heads") != config.num_heads:
            raise StartupError("config.json: the tower's `num_key_value_heads` must be its `num_attention_heads`.")
        if config.head_dim % 4:
            raise StartupError("config.json: the tower's `head_dim` must be a multiple of 4.")
        if config.table_size < BUDGETS[-1] * config.merge_size:
            raise StartupError(
                f"config.json: `position_embedding_size` must be at least {BUDGETS[-1] * config.merge_size}: as "
                "many patches may a side of an image have."
            )
        if flag(vision, "attention_bias"):
            raise StartupError("config.json: `attention_bias` of the tower is true; this network has no biases.")
        return config


@dataclass(frozen=True, kw_only=True)
class UnifiedVision(ImageConfig):
    """Image settings without a tower: one matrix embeds the values of a token's patches in *width* channels."""

    width: Annotated[int, "mm_embed_dim"]
    table_size: Annotated[int, "mm_posemb_size"]

    @classmethod
    def read_vision(cls, vision: Mapping[str, Any], out_hidden_size: int) -> Self:
        vision = {**UNIFIED_VISION_DEFAULTS, **vision}
        config = cls(out_hidden_size=out_hidden_size, **values_of(cls, vision))
        if integer(vision, "output_proj_dims") != config.width:
            raise StartupError("config.json: `output_proj_dims` of images must be their `mm_embed_dim`.")
        if config.table_size < BUDGETS[-1]:
            raise StartupError(
                f"config.json: `mm_posemb_size` must be at least {BUDGETS[-1]}, the most tokens of a side."
            )
        return config


@dataclass(frozen=True)
class Spec(MergedPatchSpec):
    """Implements models.spec.ModelSpec for the models with a tower."""

    style: ClassVar[TextStyle] = STYLE
    images: ClassVar[type[ImageConfig]] = GemmaVision

    text: GemmaText
    vision: Any
    placeholder_of: Mapping[str, int]

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> Self:
        """Read config.json. Raises a StartupError that names the key."""
        # Ids and ties that a file leaves out are transformers' Gemma4Config's.
        config = {"image_token_id": 258_880, "video_token_id": 258_884, **TIED, **config}
        text = GemmaText.read_decoder(text_section(config), cls.style)
        vision = cls.images.read_vision(section(config, "vision_config"), text.hidden_size)
        return cls(text, vision, placeholders(config, text.vocab_size))

    @property
    def longest_whole(self) -> int:
        """The largest token budget of an image if its tokens see each other, or else 0."""
        return BUDGETS[-1] if self.text.sees_images else 0

    def span_lengths(self, grid: Grid, modality: str) -> tuple[int, ...]:
        """Return the lengths of an item's runs of placeholders: one for an image, or one per frame of a video."""
        return (self.item_tokens(grid) // grid[0],) * grid[0]


class UnifiedSpec(Spec):
    """The spec of the model without a tower."""

    style, images = UNIFIED_STYLE, UnifiedVision

    @property
    def num_encoder_layers(self) -> int:
        """Just one: the embedding."""
        return 1

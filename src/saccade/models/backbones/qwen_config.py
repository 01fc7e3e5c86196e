"""Qwen's config.json, checked: what networks and facts are made from. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from saccade.errors import StartupError
from saccade.models.backbones.model_config import choice, integer, number, section

ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "silu")


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
        # Older releases have rope_scaling beside rope_theta; newer ones put both into rope_parameters.
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


@dataclass(frozen=True)
class VisionConfig:
    """The vision half of config.json, checked. *deepstack_layers* are the blocks whose output is merged as well."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    side: int
    patch_size: int
    merge_size: int
    temporal_patch_size: int
    channels: int
    activation: str
    deepstack_layers: tuple[int, ...]

    @classmethod
    def read(cls, vision: Mapping[str, Any]) -> "VisionConfig":
        """Read `vision_config`. Raises StartupError, naming the key."""
        num_positions = integer(vision, "num_position_embeddings")
        side = round(num_positions**0.5)
        if side * side != num_positions:
            raise StartupError(f"config.json: `num_position_embeddings` must be a square, not {num_positions}.")
        config = cls(
            depth=integer(vision, "depth"),
            hidden_size=integer(vision, "hidden_size"),
            intermediate_size=integer(vision, "intermediate_size"),
            num_heads=integer(vision, "num_heads"),
            out_hidden_size=integer(vision, "out_hidden_size"),
            side=side,
            patch_size=integer(vision, "patch_size"),
            merge_size=integer(vision, "spatial_merge_size"),
            temporal_patch_size=integer(vision, "temporal_patch_size"),
            channels=integer(vision, "in_channels"),
            activation=choice(vision, "hidden_act", ACTIVATIONS),
            deepstack_layers=_deepstack_layers(vision),
        )
        if config.hidden_size % (4 * config.num_heads):
            raise StartupError("config.json: the vision tower's `hidden_size` must be a multiple of 4 * `num_heads`.")
        return config

    @property
    def patch_values(self) -> int:
        """Values of one patch of one frame."""
        return self.channels * self.patch_size * self.patch_size


def _deepstack_layers(vision: Mapping[str, Any]) -> tuple[int, ...]:
    layers = vision.get("deepstack_visual_indexes")
    depth = integer(vision, "depth")
    if not isinstance(layers, list) or not all(isinstance(layer, int) and 0 <= layer < depth for layer in layers):
        raise StartupError(
            f"config.json: `deepstack_visual_indexes` must list blocks of the vision tower (0 to {depth - 1}), "
            f"not {layers!r}; [] where there are none."
        )
    return tuple(layers)

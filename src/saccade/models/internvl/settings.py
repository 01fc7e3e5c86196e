"""The processor's settings, from the files of either form of release. Does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any

from saccade.errors import StartupError
from saccade.models.backbones.clip_config import ClipConfig
from saccade.models.backbones.model_config import check_equal, choice, number, part
from saccade.models.preprocessing import processor_config
from saccade.protocol.model_files import PREPROCESSOR_CONFIG

CHAT: Mapping[str, Any] = MappingProxyType(
    {"dynamic_image_size": True, "pad2square": False, "use_thumbnail": True, "ps_version": "v2", "select_layer": -1}
)
"""Settings with one supported value, of the release's own form of config.json: `llm_config` is the text network's."""

NATIVE: Mapping[str, Any] = MappingProxyType(
    {"vision_feature_layer": -1, "vision_feature_select_strategy": "default", "projector_hidden_act": "gelu"}
)
VISION: Mapping[str, Any] = MappingProxyType({"use_mean_pooling": True, "use_absolute_position_embeddings": True})
SILENT_VISION: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 448,
        "patch_size": 14,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
        "norm_type": "layer_norm",
        "qkv_bias": True,
    }
)
"""The defaults of transformers' InternVLVisionConfig, and of the release's own form the bias of its smaller tower."""


@dataclass(frozen=True)
class InternConfig(ClipConfig):
    """InternViT's configuration. The 6B tower has *qk_norm* and *rms_norm*, and no *qkv_bias*."""

    qkv_bias: Annotated[bool, "qkv_bias"]
    qk_norm: Annotated[bool, "qk_normalization"]
    rms_norm: Annotated[bool, "rms_norm"]


def is_chat(config: Mapping[str, Any]) -> bool:
    """Return whether config.json has the release's own form."""
    return "llm_config" in config


def resolve(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> dict[str, Any]:
    """Return tile, min_tiles, max_tiles, patch_size, view_tokens, image_mean and image_std.

    *tile* is in pixels; *view_tokens* is the number of tokens in one view. Raises StartupError if a value is wrong or
    not supported.
    """
    processor_config.check_fixed(preprocessor, {**processor_config.FIXED, "resample": 3})
    vision = tower(config)
    source, least, most = (
        (config, "min_dynamic_patch", "max_dynamic_patch")
        if is_chat(config)
        else (preprocessor, "min_patches", "max_patches")
    )
    size = preprocessor.get("size")
    tile = vision.image_size if size is None else processor_config.side_of_square(size, "size")
    if tile != vision.image_size:
        raise StartupError(
            f"{PREPROCESSOR_CONFIG}: size is {tile} x {tile}, but the vision tower in config.json takes images of "
            f"{vision.image_size} x {vision.image_size} pixels; only equal sizes are supported."
        )
    min_tiles = processor_config.whole_number(_or(source.get(least), 1), least)
    max_tiles = processor_config.whole_number(_or(source.get(most), 12), most)
    if min_tiles > max_tiles:
        raise StartupError(f"{least} is {min_tiles}, but may be at most {most}, {max_tiles}.")
    return {
        "tile": tile,
        "min_tiles": min_tiles,
        "max_tiles": max_tiles,
        "patch_size": vision.patch_size,
        "view_tokens": (vision.side // scale(config, vision)) ** 2,
        **processor_config.colours(preprocessor, {} if is_chat(config) else processor_config.CLIP_COLOURS),
    }


def tower(config: Mapping[str, Any]) -> InternConfig:
    """Return the vision tower's configuration. Raises StartupError."""
    check_equal(config, CHAT if is_chat(config) else NATIVE)
    vision = {**SILENT_VISION, **part(config, "vision_config")}
    check_equal(vision, VISION)
    if not is_chat(config):
        vision |= {"qkv_bias": vision.get("attention_bias"), "qk_normalization": vision.get("use_qk_norm")}
    vision["rms_norm"] = choice(vision, "norm_type", ("layer_norm", "rms_norm")) == "rms_norm"
    for key in ("image_size", "patch_size"):
        match vision[key]:
            case [height, width] if height == width:
                vision[key] = height
    if is_chat(config) and config.get("force_image_size") is not None:
        check_equal(config, {"force_image_size": vision["image_size"]})
    return InternConfig.read_vision(vision)


def scale(config: Mapping[str, Any], vision: ClipConfig) -> int:
    """Return how many patches in each direction become one token. Raises StartupError."""
    ratio = number({"downsample_ratio": 0.5, **config}, "downsample_ratio")
    factor = round(1 / ratio)
    if factor * ratio != 1 or vision.side % factor:
        raise StartupError(
            f"config.json: `downsample_ratio` is {ratio:g}; it must be 1 divided by a whole number that divides the "
            f"{vision.side} patches along the side of a view."
        )
    return factor


def _or(value: Any, default: int) -> Any:
    return default if value is None else value

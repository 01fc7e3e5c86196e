"""The processor's settings, from config.json and preprocessor_config.json. Does not import torch."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from saccade.errors import StartupError
from saccade.models.backbones.clip_config import ClipConfig
from saccade.models.backbones.model_config import integer
from saccade.models.preprocessing import processor_config
from saccade.protocol.model_files import PREPROCESSOR_CONFIG

FILTERS: Mapping[int, str] = MappingProxyType({1: "lanczos", 3: "bicubic"})
"""The supported filters, by Pillow's numbers."""

SILENT: Mapping[str, Any] = MappingProxyType(
    {
        "size": {"longest_edge": 4 * 364},
        "max_image_size": {"longest_edge": 364},
        "resample": 1,
        "do_image_splitting": True,
        **processor_config.HALF_COLOURS,
    }
)
"""The defaults of preprocessor_config.json: transformers, Idefics3ImageProcessor."""

SILENT_VISION: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 1152,
        "num_attention_heads": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    }
)
"""The defaults of vision_config that differ from CLIP's: transformers, Idefics3VisionConfig."""

DEFAULT_SCALE = 2


def resolve(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> dict[str, Any]:
    """Return longest_edge, tile, splits, filter, patch_size, view_tokens, image_mean and image_std.

    *longest_edge* and *tile* are in pixels; *view_tokens* is the number of tokens in one view. Raises StartupError if a
    value is wrong or not supported.
    """
    processor_config.check_fixed(preprocessor, {**processor_config.FIXED, "do_convert_rgb": True, "do_pad": True})
    options = {**SILENT, **{key: value for key, value in preprocessor.items() if value is not None}}
    vision, tile = tower(config), _edge(options["max_image_size"], "max_image_size")
    if tile != vision.image_size:
        raise StartupError(
            f"{PREPROCESSOR_CONFIG}: max_image_size.longest_edge is {tile}, but the vision tower in config.json takes "
            f"images of {vision.image_size} x {vision.image_size} pixels; only equal sizes are supported."
        )
    if options["resample"] not in FILTERS:
        raise StartupError(
            f"{PREPROCESSOR_CONFIG} sets resample to {options['resample']!r}; it must be 1 (Lanczos) or 3 (bicubic)."
        )
    if type(options["do_image_splitting"]) is not bool:
        raise StartupError(
            f"{PREPROCESSOR_CONFIG}: do_image_splitting must be true or false, not {options['do_image_splitting']!r}."
        )
    return {
        "longest_edge": _edge(options["size"], "size"),
        "tile": tile,
        "splits": options["do_image_splitting"],
        "filter": FILTERS[options["resample"]],
        "patch_size": vision.patch_size,
        "view_tokens": view_tokens(config, vision),
        **processor_config.colours(options),
    }


def tower(config: Mapping[str, Any]) -> ClipConfig:
    """Return the vision tower's configuration, which has the form of CLIP's. Raises StartupError."""
    vision = config.get("vision_config") or {}
    if not isinstance(vision, Mapping):
        raise StartupError(f"config.json: `vision_config` must be an object, not {vision!r}.")
    return ClipConfig.read_vision({**SILENT_VISION, **vision})


def scale(config: Mapping[str, Any], vision: ClipConfig) -> int:
    """Return how many patches in each direction become one token. Raises StartupError."""
    factor = integer({"scale_factor": DEFAULT_SCALE, **config}, "scale_factor")
    if vision.side % factor:
        raise StartupError(
            f"config.json: `scale_factor` is {factor}, which does not divide the {vision.side} patches along the side "
            "of a view."
        )
    return factor


def view_tokens(config: Mapping[str, Any], vision: ClipConfig) -> int:
    """Return the number of tokens in one view. Raises StartupError."""
    return (vision.side // scale(config, vision)) ** 2


def _edge(value: object, key: str) -> int:
    """Return the number of pixels in {"longest_edge": number}, found under *key*."""
    sizes = {name: one for name, one in value.items() if one is not None} if isinstance(value, Mapping) else {}
    if set(sizes) != {"longest_edge"}:
        raise StartupError(f"{PREPROCESSOR_CONFIG}: {key} must have only longest_edge, not {value!r}.")
    return processor_config.whole_number(sizes["longest_edge"], f"{key}.longest_edge")

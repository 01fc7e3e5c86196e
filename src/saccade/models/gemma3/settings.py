"""The processor's settings, from config.json and preprocessor_config.json, for the gateway and the engine.

Does not import torch.
"""

from collections.abc import Mapping
from math import isqrt
from types import MappingProxyType
from typing import Any

from saccade.errors import StartupError
from saccade.models.backbones.clip_config import ClipConfig
from saccade.models.backbones.model_config import check_equal, integer
from saccade.models.preprocessing import processor_config
from saccade.protocol.model_files import PREPROCESSOR_CONFIG

BILINEAR = 2
FIXED: Mapping[str, Any] = MappingProxyType(
    {**processor_config.FIXED, "do_convert_rgb": True, "do_pan_and_scan": False, "resample": BILINEAR}
)
"""Settings with one supported value, which is also their default."""

DEFAULT_SIDE = 224
"""The default of preprocessor_config.json, in pixels: transformers, Gemma3ImageProcessor."""

VISION_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "model_type": "siglip_vision_model",
        "patch_size": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    }
)
"""The defaults of vision_config that differ from CLIP's: transformers, SiglipVisionConfig."""

TOKENS_PER_IMAGE = "mm_tokens_per_image"
DEFAULT_TOKENS = 256


def resolve(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> dict[str, Any]:
    """Return image_size, patch_size, view_tokens, image_mean and image_std.

    Raises StartupError if a value is wrong or not supported.
    """
    processor_config.check_fixed(preprocessor, FIXED)
    vision = tower(config)
    size = preprocessor.get("size")
    side = processor_config.side_of_square(DEFAULT_SIDE if size is None else size, "size")
    if side != vision.image_size:
        raise StartupError(
            f"{PREPROCESSOR_CONFIG} resizes to {side} x {side} pixels, but the vision tower in config.json takes "
            f"images of {vision.image_size} x {vision.image_size} pixels."
        )
    num_tokens = tokens_per_image(config, vision)
    processor_config.check_fixed(preprocessor, {"image_seq_length": num_tokens})
    return {
        "image_size": vision.image_size,
        "patch_size": vision.patch_size,
        "view_tokens": num_tokens,
        **processor_config.colours(preprocessor, processor_config.HALF_COLOURS),
    }


def tower(config: Mapping[str, Any]) -> ClipConfig:
    """Return the vision tower's configuration, which has the form of CLIP's. Raises StartupError."""
    vision = config.get("vision_config") or {}
    if not isinstance(vision, Mapping):
        raise StartupError(f"config.json: `vision_config` must be an object, not {vision!r}.")
    vision = {**VISION_DEFAULTS, **vision}
    check_equal(vision, {"model_type": VISION_DEFAULTS["model_type"]})
    return ClipConfig.read_vision(vision)


def tokens_per_image(config: Mapping[str, Any], vision: ClipConfig) -> int:
    """Return the number of tokens in an image, which form a square whose side divides the image's side in patches.

    Raises StartupError.
    """
    stated = {TOKENS_PER_IMAGE: DEFAULT_TOKENS, **{key: one for key, one in config.items() if one is not None}}
    num_tokens = integer(stated, TOKENS_PER_IMAGE)
    side = isqrt(num_tokens)
    if side**2 != num_tokens or vision.side % side:
        raise StartupError(
            f"config.json: `{TOKENS_PER_IMAGE}` is {num_tokens}; it must be the square of a number that divides the "
            f"{vision.side} patches along the side of an image."
        )
    return num_tokens

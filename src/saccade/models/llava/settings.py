"""The processor's settings, from config.json and preprocessor_config.json, for the gateway and the engine.

Does not import torch.
"""

from collections.abc import Mapping
from typing import Any

from saccade.errors import StartupError
from saccade.models.backbones.clip_config import LARGE_336, ClipConfig
from saccade.models.preprocessing import processor_config, smart_resize
from saccade.protocol.model_files import PREPROCESSOR_CONFIG

TOWER = "clip_vision_model"
NEXT_ARCHITECTURE = "LlavaNextForConditionalGeneration"
NEXT_MODEL_TYPE = "llava_next"
DEFAULT_EDGE = 224
DEFAULT_PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


def resolve(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> dict[str, Any]:
    """Return image_size, patch_size, shortest_edge, has_class_token, pinpoints, image_mean and image_std.

    *pinpoints* is a list of [height, width], or None for LLaVA-1.5. Raises StartupError if a value is wrong or not
    supported.
    """
    processor_config.check_fixed(preprocessor, {**smart_resize.FIXED, "do_center_crop": True})
    vision = tower(config)
    image_size = vision.image_size
    edge, crop = _edges(preprocessor)
    anyres = has_tiles(config)
    if crop != image_size or edge < crop or (anyres and edge != crop):
        raise StartupError(
            f"{PREPROCESSOR_CONFIG} resizes to {edge} and crops to {crop}, but the vision tower in "
            f"config.json takes images of {image_size} x {image_size} pixels."
        )
    if not anyres:
        processor_config.check_fixed(preprocessor, {"do_pad": False})
    return {
        "image_size": image_size,
        "patch_size": vision.patch_size,
        "shortest_edge": edge,
        "has_class_token": has_class_token(config),
        "pinpoints": _pinpoints(config, preprocessor, image_size) if anyres else None,
        **processor_config.colours(preprocessor, processor_config.CLIP_COLOURS),
    }


def has_tiles(config: Mapping[str, Any]) -> bool:
    """Return whether the model is LLaVA-NeXT, which takes a base view and tiles; LLaVA-1.5 takes one square view."""
    architectures = config.get("architectures") or []
    return NEXT_ARCHITECTURE in architectures if architectures else config.get("model_type") == NEXT_MODEL_TYPE


def has_class_token(config: Mapping[str, Any]) -> bool:
    """Return whether a view's features begin with the class token's. Raises StartupError."""
    strategies = {"default": False} if has_tiles(config) else {"default": False, "full": True}
    strategy = config.get("vision_feature_select_strategy", "default")
    if strategy not in strategies:
        raise StartupError(
            f"config.json: vision_feature_select_strategy {strategy!r} is not supported; only {', '.join(strategies)}."
        )
    return strategies[strategy]


def tower(config: Mapping[str, Any]) -> ClipConfig:
    """Return the vision tower's configuration. Raises StartupError for any tower other than CLIP's.

    Without a vision_config, the tower is the releases' own: transformers, LlavaConfig.
    """
    vision = config.get("vision_config")
    vision = LARGE_336 if vision is None else vision
    if not isinstance(vision, Mapping) or vision.get("model_type", TOWER) != TOWER:
        raise StartupError(f"config.json: vision_config must be a {TOWER}, the only supported vision tower.")
    return ClipConfig.read_vision(vision)


def _edges(preprocessor: Mapping[str, Any]) -> tuple[int, int]:
    """Return the shortest edge after the resize and the edge of the square crop, in pixels."""
    size, crop_size = (
        DEFAULT_EDGE if preprocessor.get(key) is None else preprocessor[key] for key in ("size", "crop_size")
    )
    stated = {key: one for key, one in size.items() if one is not None} if isinstance(size, Mapping) else {}
    # Older files have the number itself.
    edge = stated["shortest_edge"] if stated.keys() == {"shortest_edge"} else size
    return (
        processor_config.whole_number(edge, "size.shortest_edge"),
        processor_config.side_of_square(crop_size, "crop_size"),
    )


def _pinpoints(config: Mapping[str, Any], preprocessor: Mapping[str, Any], tile: int) -> list[list[int]]:
    """Return the resolutions for images, in the checkpoint's order, because the first of equally good ones is used."""
    lists = [source["image_grid_pinpoints"] for source in (preprocessor, config) if source.get("image_grid_pinpoints")]
    pinpoints = lists[0] if lists else DEFAULT_PINPOINTS
    if any(other != pinpoints for other in lists):
        raise StartupError(f"image_grid_pinpoints in config.json and {PREPROCESSOR_CONFIG} must be the same.")
    if not isinstance(pinpoints, list) or not all(_is_pinpoint(one, tile) for one in pinpoints):
        raise StartupError(
            f"image_grid_pinpoints must be a list of [height, width], multiples of {tile} each, not {pinpoints!r}."
        )
    return pinpoints


def _is_pinpoint(value: object, tile: int) -> bool:
    sides = value if isinstance(value, list) else []
    return len(sides) == 2 and all(type(side) is int and side > 0 and side % tile == 0 for side in sides)

"""Computes sizes, grids and token counts for vision towers that merge 2 x 2 patches. Needs neither torch nor pixels.

Source of the resize rule and the order of patches: transformers 5.23, models/qwen2_vl/image_processing_qwen2_vl.py,
smart_resize and patchify. The wire carries uint8 patches of one frame. The engine normalises them, (x - mean*255) /
(std*255), and sums its kernel over time instead of doubling the frame.
"""

import math
from collections.abc import Container, Mapping
from typing import Any, ClassVar

import msgspec

from saccade.errors import ImageTooLarge, InvalidValue, StartupError
from saccade.models.family import ImageOptions, VideoOptions
from saccade.models.preprocessing import processor_config
from saccade.models.preprocessing.processor_config import CHANNELS, check_fixed, check_tower, colours, whole_number
from saccade.protocol.media import ImageLayout
from saccade.protocol.model_files import PREPROCESSOR_CONFIG

MAX_ASPECT = 200
BICUBIC = 3
LOW_DETAIL_PIXELS = 512 * 512
"""The most pixels with `detail: low`: OpenAI's size for it."""

MOST_PIXELS = 16 * 1024 * 1024
"""The largest limit of pixels that a request may set, unless the model's own is higher: 4096 x 4096."""

FIXED: Mapping[str, Any] = {**processor_config.FIXED, "do_convert_rgb": True, "resample": BICUBIC}
EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
"""Limits of the pixels of an image, and their names in `size`."""

TOWER_KEYS = {
    "patch_size": "patch_size",
    "spatial_merge_size": "merge_size",
    "temporal_patch_size": "temporal_patch_size",
}
"""The vision tower's keys in config.json, and their settings."""


class SmartResizeLayout:
    """Computes an image's layout from its dimensions. A family adds *defaults*, and its own `image` if it differs.

    *defaults* apply to keys that preprocessor_config.json lacks. Without *limits_outside_size*, pixel limits count only
    inside `size`, as in the reference.
    """

    defaults: ClassVar[Mapping[str, Any]]
    limits_outside_size: ClassVar[bool] = True

    def __init__(self, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> None:
        self.settings: Mapping[str, Any] = resolve(
            preprocessor, self.defaults, limits_outside_size=self.limits_outside_size
        )
        check_patches(config, self.settings, self.defaults)

    def settings_for(self, options: ImageOptions) -> Mapping[str, Any]:
        """Return `settings` with the limits that *options* set. Raises InvalidValue."""
        return adjusted(self.settings, options)

    @staticmethod
    def image(width: int, height: int, settings: Mapping[str, Any]) -> ImageLayout:
        """Return grid (1, rows, columns), tokens and patch shape. Raises ImageTooLarge."""
        return image_layout(width, height, settings)

    def external(self, layout: ImageLayout, dtype: str) -> ImageLayout:
        """Return *layout* with the reference's patches, [3 * temporal_patch_size * patch_size * patch_size] each."""
        patches, width = layout.pixel_shape
        shape = (patches, width * self.settings["temporal_patch_size"])
        return msgspec.structs.replace(layout, pixel_shape=shape, pixel_dtype=dtype)


def check_patches(config: Mapping[str, Any], settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise StartupError if config.json's tower takes other patches than *settings*. *defaults* fill missing keys."""
    vision = config.get("vision_config")
    if vision is not None:
        vision = {**{key: defaults[setting] for key, setting in TOWER_KEYS.items()}, **vision}
    check_tower(vision, settings, TOWER_KEYS)


def resolve(
    preprocessor: Mapping[str, Any], defaults: Mapping[str, Any], *, limits_outside_size: bool = True
) -> dict[str, Any]:
    """Return the settings of a parsed preprocessor_config.json, with *defaults* for missing keys.

    They are patch_size, temporal_patch_size, merge_size, min_pixels and max_pixels (of the resized image), image_mean
    and image_std (for values from 0 to 1). See SmartResizeLayout for *limits_outside_size*. Raises StartupError if a
    value is wrong or not supported.
    """
    check_fixed(preprocessor, FIXED)
    if not limits_outside_size:
        preprocessor = {key: value for key, value in preprocessor.items() if key not in EDGES}
    settings = {
        key: default if (value := preprocessor.get(key)) is None else value for key, default in defaults.items()
    }
    settings |= _pixel_limits(preprocessor, defaults)
    for key in ("patch_size", "temporal_patch_size", "merge_size", "min_pixels", "max_pixels"):
        whole_number(settings[key], key)
    if settings["patch_size"] * settings["merge_size"] % 2:
        raise StartupError(
            f"{PREPROCESSOR_CONFIG}: patch_size or merge_size must be even, so that merged blocks have an even size."
        )
    if settings["min_pixels"] > settings["max_pixels"]:
        raise StartupError(
            f"{PREPROCESSOR_CONFIG}: min_pixels is {settings['min_pixels']}, but may be at most max_pixels, "
            f"{settings['max_pixels']}."
        )
    return settings | colours(settings)


def _pixel_limits(preprocessor: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return min_pixels and max_pixels. These keys override `size`, which may use other names for them."""
    size = preprocessor.get("size")
    above = {key: value for key in EDGES if (value := preprocessor.get(key)) is not None}
    within = defaults if size is None else _limits_of(size, above)
    limits = {key: above.get(key, within.get(key)) for key in EDGES}
    if None in limits.values():
        raise _wrong_size(size)
    return limits


def _limits_of(size: object, above: Container[str]) -> dict[str, Any]:
    """Return the limits that `size` has, under either name.

    Raises StartupError for other keys, or if a limit's two names disagree. They may disagree about a limit in *above*,
    which takes precedence.
    """
    stated = {key: value for key, value in size.items() if value is not None} if isinstance(size, Mapping) else {"": 0}
    names = {name: key for key, edge in EDGES.items() for name in (key, edge)}
    limits: dict[str, Any] = {}
    for name, value in stated.items():
        if name not in names:
            raise _wrong_size(size)
        if limits.setdefault(names[name], value) != value and names[name] not in above:
            raise _wrong_size(size)
    return limits


def _wrong_size(size: object) -> StartupError:
    return StartupError(
        f"{PREPROCESSOR_CONFIG}: size must have {' and '.join(EDGES.values())}, in pixels of the whole image, and "
        f"nothing else, not {size!r}."
    )


def check_aspect(width: int, height: int) -> None:
    """Raise ImageTooLarge if one side is over 200 times the other."""
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise ImageTooLarge(
            f"The image has {width} x {height} pixels; its long side may be at most {MAX_ASPECT} times its short one."
        )


def resized(width: int, height: int, settings: Mapping[str, Any]) -> tuple[int, int]:
    """Return (height, width) of the resized image: near the original size, in merged patches, within the limits.

    Python's round half to even is part of the rule. Raises ImageTooLarge if one side is over 200 times the other.
    """
    check_aspect(width, height)
    factor = settings["patch_size"] * settings["merge_size"]
    rows, columns = round(height / factor), round(width / factor)
    if rows * columns * factor * factor > settings["max_pixels"]:
        shrink = math.sqrt(height * width / settings["max_pixels"])
        rows = max(1, math.floor(height / shrink / factor))
        columns = max(1, math.floor(width / shrink / factor))
    elif rows * columns * factor * factor < settings["min_pixels"]:
        grow = math.sqrt(settings["min_pixels"] / (height * width))
        rows, columns = math.ceil(height * grow / factor), math.ceil(width * grow / factor)
    return rows * factor, columns * factor


def adjusted(settings: Mapping[str, Any], options: ImageOptions) -> Mapping[str, Any]:
    """Return *settings* with the limits of *options*; the same object if nothing changes. Raises InvalidValue.

    `detail: low` lowers the model's own min_pixels if necessary, but not the request's.
    """
    minimum = _limit(options.min_pixels, "min_pixels", settings)
    maximum = _limit(options.max_pixels, "max_pixels", settings)
    if options.detail == "low":
        maximum = min(maximum, LOW_DETAIL_PIXELS)
        minimum = min(minimum, maximum) if options.min_pixels is None else minimum
        if minimum > maximum == LOW_DETAIL_PIXELS:
            raise InvalidValue(
                f"`min_pixels` ({minimum}) is more than `detail: low` allows ({maximum}); send less, or leave out "
                "`detail`.",
                "mm_processor_kwargs",
            )
    check_order(minimum, maximum, options)
    if (minimum, maximum, options.resized_height) == (settings["min_pixels"], settings["max_pixels"], None):
        return settings
    return {**settings, "min_pixels": minimum, "max_pixels": maximum, **sides(options)}


def sides(options: ImageOptions | VideoOptions) -> dict[str, int]:
    """Return the settings for the sides in *options*, or {} if it has none."""
    if options.resized_height is None or options.resized_width is None:
        return {}
    return {"resized_height": options.resized_height, "resized_width": options.resized_width}


def check_order(minimum: int, maximum: int, options: ImageOptions | VideoOptions) -> None:
    """Raise InvalidValue if *minimum* exceeds *maximum*. Each is from *options*, or the model's own if that is None."""
    if minimum <= maximum:
        return
    if options.min_pixels is None:
        fault = (
            f"`max_pixels` ({maximum}) is less than this model's `min_pixels` ({minimum}); send a `min_pixels` of at "
            f"most {maximum} too."
        )
    elif options.max_pixels is None:
        fault = (
            f"`min_pixels` ({minimum}) is more than this model's `max_pixels` ({maximum}); send a `max_pixels` of at "
            f"least {minimum} too."
        )
    else:
        fault = f"`min_pixels` ({minimum}) is more than `max_pixels` ({maximum})."
    raise InvalidValue(fault, "mm_processor_kwargs")


def _limit(value: int | None, key: str, settings: Mapping[str, Any]) -> int:
    """Return *value*, or the model's own limit if it is None. Raises InvalidValue."""
    most = max(MOST_PIXELS, settings["max_pixels"])
    if value is None:
        return int(settings[key])
    if type(value) is not int or not 1 <= value <= most:
        raise InvalidValue(f"{key} must be a whole number from 1 to {most}.", f"mm_processor_kwargs.{key}")
    return value


def image_layout(width: int, height: int, settings: Mapping[str, Any]) -> ImageLayout:
    """Return the layout of an upright image of *width* x *height* pixels, or with the sides in *settings*.

    Raises ImageTooLarge.
    """
    width, height = settings.get("resized_width", width), settings.get("resized_height", height)
    patch, merge = settings["patch_size"], settings["merge_size"]
    resized_height, resized_width = resized(width, height, settings)
    rows, columns = resized_height // patch, resized_width // patch
    return ImageLayout(
        resized_height=resized_height,
        resized_width=resized_width,
        grid=(1, rows, columns),
        num_tokens=rows * columns // merge**2,
        pixel_shape=(rows * columns, CHANNELS * patch * patch),
    )

"""Resize rule and counts of the towers that merge 2 x 2 patches. No torch, no pixels.

Source of rule and order: transformers 5.23, models/qwen2_vl/image_processing_qwen2_vl.py, smart_resize and patchify.
The wire carries uint8 patches of one frame; the engine doubles the frame and normalises: (x - mean*255) / (std*255).
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from saccade.errors import ImageTooLarge, InternalError, InvalidValue, StartupError
from saccade.models.family import PictureOptions
from saccade.models.preprocessing.configuration import (
    CHANNELS,
    PREPROCESSOR_CONFIG,
    check_fixed,
    deviations,
    one_per_channel,
    whole_number,
)
from saccade.protocol.media import PictureLayout

MAX_ASPECT = 200
BICUBIC = 3
LOW_DETAIL_PIXELS = 512 * 512
"""What `detail: low` leaves of a picture: OpenAI's own size for it."""

MOST_PIXELS = 16 * 1024 * 1024
"""The most that a request may ask for where the model's own limit is not higher: 4096 x 4096."""

FIXED: Mapping[str, Any] = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "resample": BICUBIC,
    "rescale_factor": 1 / 255,
}
"""Settings that have one served value; another one would show the model other pixels than it was trained on."""

TOWER_KEYS = (
    ("patch_size", "patch_size"),
    ("spatial_merge_size", "merge_size"),
    ("temporal_patch_size", "temporal_patch_size"),
)


class MergeBlocksLayout:
    """Counts from dimensions. A family adds its data.

    *defaults* hold where preprocessor_config.json is silent.
    """

    defaults: ClassVar[Mapping[str, Any]]

    def __init__(self, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> None:
        self.settings: Mapping[str, Any] = resolve(preprocessor, self.defaults)
        check_tower(config, self.settings)

    def settings_for(self, options: PictureOptions) -> Mapping[str, Any]:
        """Return `settings` with the limits that *options* set. Raises InvalidValue."""
        return adjusted(self.settings, options)

    def picture(self, width: int, height: int, settings: Mapping[str, Any]) -> PictureLayout:
        """Return grid (1, rows, columns), tokens and patch shape. Raises ImageTooLarge."""
        return picture_layout(width, height, settings)

    def foreign(self, layout: PictureLayout, dtype: str) -> PictureLayout:
        """Return *layout* as the reference has it: patches of [3 * temporal_patch_size * patch_size * patch_size]."""
        patches, width = layout.pixel_shape
        shape = (patches, width * self.settings["temporal_patch_size"])
        return msgspec.structs.replace(layout, pixel_shape=shape, pixel_dtype=dtype)


def resolve(preprocessor: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a parsed preprocessor_config.json, from *defaults* where it is silent.

    They are patch_size, temporal_patch_size, merge_size, min_pixels and max_pixels (of the resized picture), image_mean
    and image_std (of values in 0 to 1). Raises StartupError where a value is wrong or not served.
    """
    check_fixed(preprocessor, FIXED)
    settings = {
        key: default if (value := preprocessor.get(key)) is None else value for key, default in defaults.items()
    }
    settings |= _pixel_limits(preprocessor, defaults)
    for key in ("patch_size", "temporal_patch_size", "merge_size", "min_pixels", "max_pixels"):
        whole_number(settings[key], key)
    if settings["patch_size"] * settings["merge_size"] % 2:
        raise StartupError(f"{PREPROCESSOR_CONFIG} cuts blocks of an odd size; one of patch_size, merge_size is even.")
    if settings["min_pixels"] > settings["max_pixels"]:
        raise StartupError(
            f"{PREPROCESSOR_CONFIG} gives min_pixels {settings['min_pixels']}, more than max_pixels "
            f"{settings['max_pixels']}."
        )
    one_per_channel(settings["image_mean"], "image_mean")
    deviations(settings["image_std"], "image_std")
    return settings


def _pixel_limits(preprocessor: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return min_pixels and max_pixels: spelt so they win over `size`, which spells them either way."""
    size = preprocessor.get("size")
    if size is not None and not isinstance(size, Mapping):
        raise StartupError(f"{PREPROCESSOR_CONFIG} gives no usable size: {size!r} has no shortest_edge, longest_edge.")
    limits = {}
    for key, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        within = defaults[key] if size is None else size.get(edge, size.get(key))
        limits[key] = within if preprocessor.get(key) is None else preprocessor[key]
    return limits


def check_tower(config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise StartupError where the vision tower of config.json takes other patches than *settings* cut."""
    vision = config.get("vision_config") or {}
    for key, setting in TOWER_KEYS:
        if vision.get(key, settings[setting]) != settings[setting]:
            raise StartupError(
                f"config.json says vision_config.{key} is {vision[key]!r}, but {PREPROCESSOR_CONFIG} cuts "
                f"pictures with {setting} {settings[setting]!r}."
            )


def resized(width: int, height: int, settings: Mapping[str, Any]) -> tuple[int, int]:
    """Return (height, width) that the model sees: near the original, divisible by a merged patch, within the limits.

    Python's round half to even is part of the rule. Raises ImageTooLarge where one side is over 200 times the other.
    """
    factor = settings["patch_size"] * settings["merge_size"]
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise ImageTooLarge(
            f"The picture has {width} x {height} pixels; its long side may be at most {MAX_ASPECT} times its short one."
        )
    rows, columns = round(height / factor), round(width / factor)
    if rows * columns * factor * factor > settings["max_pixels"]:
        shrink = math.sqrt(height * width / settings["max_pixels"])
        rows = max(1, math.floor(height / shrink / factor))
        columns = max(1, math.floor(width / shrink / factor))
    elif rows * columns * factor * factor < settings["min_pixels"]:
        grow = math.sqrt(settings["min_pixels"] / (height * width))
        rows, columns = math.ceil(height * grow / factor), math.ceil(width * grow / factor)
    return rows * factor, columns * factor


def adjusted(settings: Mapping[str, Any], options: PictureOptions) -> Mapping[str, Any]:
    """Return *settings* with the limits of *options*; the same object where nothing changes. Raises InvalidValue.

    `detail: low` lowers the model's own least number of pixels where it must, but not one that the request sets.
    """
    minimum = _asked(options.min_pixels, "min_pixels", settings)
    maximum = _asked(options.max_pixels, "max_pixels", settings)
    if options.detail == "low":
        maximum = min(maximum, LOW_DETAIL_PIXELS)
        minimum = min(minimum, maximum) if options.min_pixels is None else minimum
    if minimum > maximum:
        raise InvalidValue(
            f"These pictures would have at least {minimum} and at most {maximum} pixels: min_pixels may not be more "
            "than max_pixels, nor than what detail: low leaves. What a request does not set is the model's own.",
            "mm_processor_kwargs",
        )
    if (minimum, maximum) == (settings["min_pixels"], settings["max_pixels"]):
        return settings
    return {**settings, "min_pixels": minimum, "max_pixels": maximum}


def _asked(value: int | None, key: str, settings: Mapping[str, Any]) -> int:
    """Return *value*, or the model's own where it is None. Raises InvalidValue."""
    most = max(MOST_PIXELS, settings["max_pixels"])
    if value is None:
        return int(settings[key])
    if type(value) is not int or not 1 <= value <= most:
        raise InvalidValue(f"{key} must be a whole number from 1 to {most}.", f"mm_processor_kwargs.{key}")
    return value


def picture_layout(width: int, height: int, settings: Mapping[str, Any]) -> PictureLayout:
    """Return the layout of an upright picture of *width* x *height* pixels. Raises ImageTooLarge."""
    patch, merge = settings["patch_size"], settings["merge_size"]
    resized_height, resized_width = resized(width, height, settings)
    rows, columns = resized_height // patch, resized_width // patch
    return PictureLayout(
        resized_height=resized_height,
        resized_width=resized_width,
        grid=(1, rows, columns),
        num_tokens=rows * columns // merge**2,
        pixel_shape=(rows * columns, CHANNELS * patch * patch),
    )


def check_layout(width: int, height: int, settings: Mapping[str, Any], layout: PictureLayout) -> None:
    """Raise InternalError where *layout*, of whatever wire, was made for another size or other settings."""
    own = picture_layout(width, height, settings)
    if (own.resized_height, own.resized_width, own.grid) != (layout.resized_height, layout.resized_width, layout.grid):
        raise InternalError("The picture decoded to another size than the one its tokens were counted for.")

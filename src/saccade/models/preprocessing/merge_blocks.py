"""Resize rule and patch order of the towers that merge 2 x 2 patches. numpy, no torch.

Source of rule and order: transformers 5.23, models/qwen2_vl/image_processing_qwen2_vl.py, smart_resize and patchify.
The wire carries uint8 patches of one frame; the engine doubles the frame and normalises: (x - mean*255) / (std*255).
"""

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from saccade.errors import ImageTooLarge, InternalError, InvalidValue, StartupError
from saccade.models.family import PictureOptions
from saccade.models.preprocessing import normalisation
from saccade.protocol.media import PictureLayout

MAX_ASPECT = 200
CHANNELS = 3
BICUBIC = 3
FILE = "preprocessor_config.json"
DEFAULTS: Mapping[str, Any] = {
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
"""What the reference processor takes where the file is silent."""

DEFAULT_SIZE: Mapping[str, int] = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
LOW_DETAIL_PIXELS = 512 * 512
"""What `detail: low` leaves of a picture: OpenAI's own size for it."""

FIXED: Mapping[str, Any] = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "resample": BICUBIC,
    "rescale_factor": 1 / 255,
}
"""Settings that have one served value; another one would show the model other pixels than it was trained on."""


def resolve(preprocessor: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a parsed preprocessor_config.json: patch_size, temporal_patch_size, merge_size,
    min_pixels, max_pixels (of the resized picture), image_mean and image_std (of values in 0 to 1).

    Raises StartupError where a value is wrong or not served.
    """
    for key, value in FIXED.items():
        if preprocessor.get(key, value) != value:
            raise StartupError(f"{FILE} sets {key} to {preprocessor[key]!r}; only {value!r} is served.")
    settings = {key: preprocessor.get(key, default) for key, default in DEFAULTS.items()}
    size = preprocessor.get("size") or DEFAULT_SIZE
    if not isinstance(size, Mapping):
        raise StartupError(f"{FILE} gives no usable size: {size!r} has no shortest_edge and longest_edge.")
    for key, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        # The older spelling wins where both are given.
        older = preprocessor.get(key)
        settings[key] = size.get(edge) if older is None else older
    for key in ("patch_size", "temporal_patch_size", "merge_size", "min_pixels", "max_pixels"):
        if not isinstance(settings[key], int) or settings[key] < 1:
            raise StartupError(f"{FILE} gives no usable {key}: {settings[key]!r} is not a positive whole number.")
    for key in ("image_mean", "image_std"):
        if not _is_one_number_a_channel(settings[key]):
            raise StartupError(f"{FILE} gives no usable {key}: {settings[key]!r} are not {CHANNELS} numbers.")
    return settings


def _is_one_number_a_channel(value: object) -> bool:
    return isinstance(value, list) and len(value) == CHANNELS and all(isinstance(one, int | float) for one in value)


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
    """Return *settings* with the limits of *options*; the same object where nothing changes. Raises InvalidValue."""
    minimum = options.min_pixels or settings["min_pixels"]
    maximum = options.max_pixels or settings["max_pixels"]
    if options.detail == "low":
        maximum = min(maximum, LOW_DETAIL_PIXELS)
        minimum = min(minimum, maximum)
    if minimum > maximum:
        raise InvalidValue(f"min_pixels {minimum} is more than max_pixels {maximum}.", "mm_processor_kwargs")
    if (minimum, maximum) == (settings["min_pixels"], settings["max_pixels"]):
        return settings
    return {**settings, "min_pixels": minimum, "max_pixels": maximum}


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


def write_patches(planes: npt.NDArray[np.uint8], settings: Mapping[str, Any], out: npt.NDArray[np.uint8]) -> None:
    """Write *planes* [3, height, width] into *out* [patches, 3 * patch * patch], both uint8, with one strided copy.

    Rows follow merged blocks: (rows / merge, columns / merge, merge, merge); each holds (channel, patch, patch).
    """
    patch, merge = settings["patch_size"], settings["merge_size"]
    channels, height, width = planes.shape
    rows, columns = height // (patch * merge), width // (patch * merge)
    blocks = planes.reshape(channels, rows, merge, patch, columns, merge, patch)
    target = out.reshape((rows, columns, merge, merge, channels, patch, patch), copy=False)
    target[...] = blocks.transpose(1, 4, 2, 5, 0, 3, 6)


def check_layout(width: int, height: int, settings: Mapping[str, Any], layout: PictureLayout) -> None:
    """Raise InternalError where *layout*, of whatever wire, was made for another size or other settings."""
    own = picture_layout(width, height, settings)
    if (own.resized_height, own.resized_width, own.grid) != (layout.resized_height, layout.resized_width, layout.grid):
        raise InternalError("The picture decoded to another size than the one its tokens were counted for.")


def foreign(layout: PictureLayout, settings: Mapping[str, Any], dtype: str) -> PictureLayout:
    """Return *layout* as the reference has it: patches of [3 * temporal_patch_size * patch_size * patch_size]."""
    patches, width = layout.pixel_shape
    shape = (patches, width * settings["temporal_patch_size"])
    return msgspec.structs.replace(layout, pixel_shape=shape, pixel_dtype=dtype)


def write_normalised(
    planes: npt.NDArray[np.uint8], settings: Mapping[str, Any], dtype: str, out: npt.NDArray[Any]
) -> None:
    """Write *planes* [3, height, width] into *out* of foreign()'s shape: float32, or bfloat16 as uint16.

    One of 256 values for each byte: (x - mean * 255) / (std * 255) in float32, as the reference processor computes it.
    """
    patch, merge, frames = settings["patch_size"], settings["merge_size"], settings["temporal_patch_size"]
    channels, height, width = planes.shape
    rows, columns = height // (patch * merge), width // (patch * merge)
    target = out.reshape((rows, columns, merge, merge, channels, frames, patch, patch), copy=False)
    for channel, table in enumerate(normalisation.tables(settings["image_mean"], settings["image_std"], dtype)):
        blocks = table[planes[channel]].reshape(rows, merge, patch, columns, merge, patch).transpose(0, 3, 1, 4, 2, 5)
        for frame in range(frames):
            target[:, :, :, :, channel, frame] = blocks

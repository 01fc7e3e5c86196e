"""Computes the grid and token count of Kimi's images from their dimensions. Runs in the gateway, without torch.

Source of the rule: the releases' media_utils.py; transformers 5.23 has it as navit_resize in
models/kimi_k25/image_processing_kimi_k25.py.
"""

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from saccade.errors import InvalidValue
from saccade.models.family import ImageOptions
from saccade.models.preprocessing.processor_config import CHANNELS
from saccade.models.preprocessing.unserved_options import SIDES, refuse
from saccade.protocol.media import ImageLayout

LOW_DETAIL_PIXELS = 512 * 512
"""The most pixels with `detail: low`: OpenAI's size for it."""


class NavitLayout:
    """Implements models.family.Layout for patches of 14 x 14 in raster order, merged 2 x 2 into one token."""

    settings: Mapping[str, Any]

    def settings_for(self, options: ImageOptions) -> Mapping[str, Any]:
        """Return `settings` with a lower in_patch_limit if *options* limit the pixels. Raises InvalidValue."""
        refuse(options, *SIDES)
        patch_pixels = self.settings["patch_size"] ** 2
        if options.min_pixels is not None:
            raise InvalidValue("min_pixels: this model never enlarges an image; leave it out.", "mm_processor_kwargs")
        if options.max_pixels is not None and options.max_pixels < patch_pixels:
            raise InvalidValue(f"max_pixels must be at least {patch_pixels}, one patch.", "mm_processor_kwargs")
        limits = [self.settings["in_patch_limit"]]
        if options.max_pixels is not None:
            limits.append(options.max_pixels // patch_pixels)
        if options.detail == "low":
            limits.append(max(1, LOW_DETAIL_PIXELS // patch_pixels))
        return {**self.settings, "in_patch_limit": min(limits)} if min(limits) < limits[0] else self.settings

    def image(self, width: int, height: int, settings: Mapping[str, Any]) -> ImageLayout:
        """Return grid (1, rows, columns), tokens and patch shape [rows * columns, 3, 14, 14] of the padded image."""
        return image_layout(width, height, settings)

    def external(self, layout: ImageLayout, dtype: str) -> ImageLayout:
        """Return *layout* with normalised patches; their shape is the same on every wire."""
        return msgspec.structs.replace(layout, pixel_dtype=dtype)


def image_layout(width: int, height: int, settings: Mapping[str, Any]) -> ImageLayout:
    """Return the layout of an upright image. Its resized size includes the padding, which enters the tower."""
    patch, merge = settings["patch_size"], settings["merge_size"]
    rows, columns = (math.ceil(side / (patch * merge)) * merge for side in resized(width, height, settings))
    return ImageLayout(
        resized_height=rows * patch,
        resized_width=columns * patch,
        grid=(1, rows, columns),
        num_tokens=rows * columns // merge**2,
        pixel_shape=(rows * columns, CHANNELS, patch, patch),
    )


def resized(width: int, height: int, settings: Mapping[str, Any]) -> tuple[int, int]:
    """Return (height, width) of the resized image before it is padded: within the limits, and never enlarged.

    The limits are numbers of patches: in_patch_limit for the image, patch_limit_on_one_side for each side.
    """
    patch = settings["patch_size"]
    longest = settings["patch_limit_on_one_side"] * patch
    num_patches = max(1, width // patch) * max(1, height // patch)
    scale = min(1.0, math.sqrt(settings["in_patch_limit"] / num_patches), longest / width, longest / height)
    new_height, new_width = (min(max(1, int(side * scale)), longest) for side in (height, width))
    return new_height, new_width

"""Computes an image's resized size, grid, tokens and text from its dimensions. Runs in the gateway, without torch.

Source of the rules: transformers 5.23, models/gemma4/image_processing_gemma4.py and processing_gemma4.py.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from saccade.errors import InvalidValue, StartupError
from saccade.models.family import ImageOptions
from saccade.models.gemma4 import BUDGETS
from saccade.models.preprocessing import smart_resize
from saccade.models.preprocessing.own_wire import OwnWireLayout
from saccade.models.preprocessing.processor_config import CHANNELS, HALF_COLOURS, check_fixed, check_tower, whole_number
from saccade.models.preprocessing.unserved_options import SIDES, refuse
from saccade.protocol.media import ImageLayout
from saccade.protocol.model_files import PREPROCESSOR_CONFIG

BEGIN, END = "<|image>", "<image|>"
DEFAULTS: Mapping[str, Any] = {"patch_size": 16, "pooling_kernel_size": 3, "max_soft_tokens": 280}
"""The defaults of transformers' Gemma4ImageProcessor."""

PLAIN_COLOURS: Mapping[str, Any] = {"image_mean": [0.0] * CHANNELS, "image_std": [1.0] * CHANNELS}
FIXED: Mapping[str, Any] = {
    **{key: value for key, value in smart_resize.FIXED.items() if key != "do_normalize"},
    **PLAIN_COLOURS,
}
"""Settings with one supported value. The network with a tower maps 0 to 1 to -1 to 1, as HALF_COLOURS do."""


class Layout(OwnWireLayout):
    """An image's layout within a token budget; each token stands for a square of patches."""

    colours: ClassVar[Mapping[str, Any]] = HALF_COLOURS

    def __init__(self, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> None:
        self.settings: Mapping[str, Any] = {**resolve(config, preprocessor, DEFAULTS), **self.colours}

    def settings_for(self, options: ImageOptions) -> Mapping[str, Any]:
        """Return `settings` with the budget that *options* choose. Raises InvalidValue."""
        refuse(options, *SIDES)
        if options.min_pixels is not None:
            raise InvalidValue(
                "min_pixels is not supported: this model enlarges every image to its budget of tokens; leave it out.",
                "mm_processor_kwargs",
            )
        budget = BUDGETS[0] if options.detail == "low" else options.max_soft_tokens
        return with_budget(self.settings, budget, options.max_pixels)

    def image(self, width: int, height: int, settings: Mapping[str, Any]) -> ImageLayout:
        """Return the layout: grid (1, rows, columns), tokens, patch shape, and the text around the tokens."""
        return image_layout(width, height, settings)


class UnifiedLayout(Layout):
    """The layout for the model without a tower, which reads colours from 0 to 1."""

    colours = PLAIN_COLOURS


def resolve(
    config: Mapping[str, Any], preprocessor: Mapping[str, Any], defaults: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the settings of a parsed preprocessor_config.json. Raises StartupError."""
    check_fixed(preprocessor, FIXED)
    own = {key: default if preprocessor.get(key) is None else preprocessor[key] for key, default in defaults.items()}
    for key in defaults:
        whole_number(own[key], key)
    if own["max_soft_tokens"] not in BUDGETS:
        raise StartupError(
            f"{PREPROCESSOR_CONFIG}: max_soft_tokens must be one of {BUDGETS}, not {own['max_soft_tokens']!r}."
        )
    keys = ("patch_size", "pooling_kernel_size")
    check_tower(config.get("vision_config"), own, dict(zip(keys, keys, strict=True)))
    if own["patch_size"] * own["pooling_kernel_size"] % 2:
        raise StartupError(f"{PREPROCESSOR_CONFIG}: patch_size or pooling_kernel_size must be even.")
    settings = {key: own[key] for key in defaults if key != "pooling_kernel_size"}
    return {**settings, "merge_size": own["pooling_kernel_size"], "temporal_patch_size": 1}


def with_budget(settings: Mapping[str, Any], budget: int | None, max_pixels: int | None) -> Mapping[str, Any]:
    """Return *settings* with a *budget* of tokens or, without one, the largest budget within *max_pixels*.

    Without either, they stay as they are. Raises InvalidValue if no budget is small enough.
    """
    area = (settings["patch_size"] * settings["merge_size"]) ** 2
    if budget is None and max_pixels is not None:
        budget = max((one for one in BUDGETS if one * area <= max_pixels), default=0)
        if not budget:
            raise InvalidValue(
                f"`max_pixels` must be at least {BUDGETS[0] * area}, {BUDGETS[0]} tokens; or send `max_soft_tokens`.",
                "mm_processor_kwargs.max_pixels",
            )
    if budget in (None, settings["max_soft_tokens"]):
        return settings
    return {**settings, "max_soft_tokens": budget}


def resized(width: int, height: int, settings: Mapping[str, Any]) -> tuple[int, int]:
    """Return (height, width) of the resized image: the largest of its shape whose whole tokens fit the budget.

    The order of the float operations is part of the rule.
    """
    budget = settings["max_soft_tokens"]
    side = settings["patch_size"] * settings["merge_size"]
    factor = math.sqrt(budget * side**2 / (height * width))
    rows, columns = math.floor(factor * height / side), math.floor(factor * width / side)
    if rows == 0:
        rows, columns = 1, min(math.floor(width / height), budget)
    elif columns == 0:
        rows, columns = min(math.floor(height / width), budget), 1
    return rows * side, columns * side


def image_layout(width: int, height: int, settings: Mapping[str, Any]) -> ImageLayout:
    """Return the layout of an upright image of *width* x *height* pixels."""
    patch, merge = settings["patch_size"], settings["merge_size"]
    resized_height, resized_width = resized(width, height, settings)
    rows, columns = resized_height // patch, resized_width // patch
    num_tokens = rows * columns // merge**2
    return ImageLayout(
        resized_height=resized_height,
        resized_width=resized_width,
        grid=(1, rows, columns),
        num_tokens=num_tokens,
        pixel_shape=(rows * columns, CHANNELS * patch * patch),
        prompt=(BEGIN, num_tokens, END),
    )

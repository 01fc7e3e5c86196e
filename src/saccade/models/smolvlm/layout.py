"""Computes an image's tiles, tokens and text from its dimensions. Runs in the gateway, without torch.

Source of the rules: transformers 5.23, models/idefics3/image_processing_idefics3.py and processing_idefics3.py.
"""

import math
from collections.abc import Mapping
from typing import Any

from saccade.models.preprocessing.own_wire import FixedSizeLayout
from saccade.models.preprocessing.processor_config import CHANNELS
from saccade.models.preprocessing.tiles import num_views
from saccade.models.smolvlm.settings import resolve
from saccade.protocol.media import ImageLayout

AROUND = "<fake_token_around_image>"
GLOBAL = "<global-img>"
MAX_EDGE = 4096
"""Pixels; a larger longest_edge has no effect."""


class Layout(FixedSizeLayout):
    """The layout of Idefics3 and SmolVLM: square tiles in high resolution, then the whole image in one square view."""

    def __init__(self, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> None:
        self.settings: Mapping[str, Any] = resolve(config, preprocessor)

    def low_detail(self) -> Mapping[str, Any]:
        """Return the setting that turns tiles off."""
        return {"splits": False}

    def image(self, width: int, height: int, settings: Mapping[str, Any]) -> ImageLayout:
        """Return the tiled image's grid (1, rows, columns) in patches, views [V, 3, s, s], and the text around them."""
        return image_layout(width, height, settings)


def image_layout(width: int, height: int, settings: Mapping[str, Any]) -> ImageLayout:
    """Return the layout of an upright image. Its resized size covers all tiles together."""
    side, view = settings["tile"], settings["tile"] // settings["patch_size"]
    rows, columns = tiles(*fitted(height, width, settings["longest_edge"]), side) if settings["splits"] else (1, 1)
    views = num_views(rows, columns)
    return ImageLayout(
        resized_height=rows * side,
        resized_width=columns * side,
        grid=(1, rows * view, columns * view),
        num_tokens=views * settings["view_tokens"],
        pixel_shape=(views, CHANNELS, side, side),
        prompt=prompt(rows, columns, settings["view_tokens"]),
    )


def fitted(height: int, width: int, longest_edge: int) -> tuple[int, int]:
    """Return (height, width) with the longer side resized to *longest_edge*, and the other to an even number.

    As in the reference, a size above MAX_EDGE is then reduced to MAX_EDGE. The rounding is part of the rule.
    """
    if width >= height:
        width, height = longest_edge, _even(int(longest_edge / (width / height)))
    else:
        width, height = _even(int(longest_edge * (width / height))), longest_edge
    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if width >= height and width > MAX_EDGE:
        width, height = MAX_EDGE, int(MAX_EDGE / ratio)
    elif height > width and height > MAX_EDGE:
        width, height = int(MAX_EDGE * ratio), MAX_EDGE
    return max(height, 1), max(width, 1)


def _even(length: int) -> int:
    return length + length % 2


def tiles(height: int, width: int, side: int) -> tuple[int, int]:
    """Return the (rows, columns) of tiles of *side* pixels that nearly keep a resized image's aspect ratio."""
    ratio = width / height
    if width >= height:
        columns = math.ceil(width / side)
        return math.ceil(int(columns * side / ratio) / side), columns
    rows = math.ceil(height / side)
    return rows, math.ceil(int(rows * side * ratio) / side)


def prompt(rows: int, columns: int, view_tokens: int) -> tuple[str | int, ...]:
    """Return an image's texts and placeholders in the prompt: each view's tokens come after a mark of its position."""
    whole: tuple[str | int, ...] = (AROUND, GLOBAL, view_tokens, AROUND)
    if rows == columns == 1:
        return whole
    parts: list[str | int] = []
    for row in range(1, rows + 1):
        for column in range(1, columns + 1):
            parts += [AROUND, f"<row_{row}_col_{column}>", view_tokens]
        parts.append("\n")
    return (*parts, "\n", *whole)

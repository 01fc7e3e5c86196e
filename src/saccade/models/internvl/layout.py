"""Computes an image's tiles and tokens from its dimensions. Runs in the gateway, without torch.

Source of the rules: transformers 5.23, models/got_ocr2/image_processing_got_ocr2.py, with `crop_to_patches`.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from saccade.models.internvl.settings import resolve
from saccade.models.preprocessing.own_wire import FixedSizeLayout
from saccade.models.preprocessing.processor_config import CHANNELS
from saccade.models.preprocessing.tiles import num_views
from saccade.protocol.media import ImageLayout

BEGIN, END = "<img>", "</img>"


class Layout(FixedSizeLayout):
    """Square tiles in the arrangement nearest to the image's aspect ratio, then the whole image as one tile."""

    def __init__(self, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> None:
        self.settings: Mapping[str, Any] = resolve(config, preprocessor)

    def low_detail(self) -> Mapping[str, Any]:
        """Return a limit of one tile."""
        return {"min_tiles": 1, "max_tiles": 1}

    def image(self, width: int, height: int, settings: Mapping[str, Any]) -> ImageLayout:
        """Return the tiled image's grid (1, rows, columns) in patches, views [V, 3, s, s], and the text around them."""
        return image_layout(width, height, settings)


def image_layout(width: int, height: int, settings: Mapping[str, Any]) -> ImageLayout:
    """Return the layout of an upright image. Its resized size covers all tiles together."""
    side, view = settings["tile"], settings["tile"] // settings["patch_size"]
    rows, columns = tiles(height, width, side, settings["min_tiles"], settings["max_tiles"])
    views = num_views(rows, columns)
    num_tokens = views * settings["view_tokens"]
    return ImageLayout(
        resized_height=rows * side,
        resized_width=columns * side,
        grid=(1, rows * view, columns * view),
        num_tokens=num_tokens,
        pixel_shape=(views, CHANNELS, side, side),
        prompt=(BEGIN, num_tokens, END),
    )


def tiles(height: int, width: int, side: int, least: int, most: int) -> tuple[int, int]:
    """Return (rows, columns) of an image's tiles: *least* to *most* tiles with sides of *side* pixels.

    Of equally near arrangements, the one with more tiles wins if the image has more than half as many pixels as its
    tiles.
    """
    best, nearest, aspect, area = (1, 1), float("inf"), width / height, width * height
    for columns, rows in arrangements(least, most):
        distance = abs(aspect - columns / rows)
        if distance < nearest or (distance == nearest and area > 0.5 * side * side * columns * rows):
            best, nearest = (rows, columns), distance
    return best


@lru_cache(maxsize=8)
def arrangements(least: int, most: int) -> tuple[tuple[int, int], ...]:
    """Return every (columns, rows) of *least* to *most* tiles, sorted by the number of tiles."""
    numbers = range(1, most + 1)
    pairs = ((columns, rows) for columns in numbers for rows in numbers if least <= columns * rows <= most)
    return tuple(sorted(pairs, key=lambda pair: pair[0] * pair[1]))

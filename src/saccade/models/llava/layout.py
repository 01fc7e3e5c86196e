"""Computes an image's grid and token count from its dimensions. Runs in the gateway, without torch.

Source of the counts: transformers 5.23, models/llava/processing_llava.py, models/llava_next/processing_llava_next.py.
"""

from collections.abc import Mapping
from typing import Any

from saccade.models.llava import tiles
from saccade.models.llava.settings import resolve
from saccade.models.preprocessing.own_wire import FixedSizeLayout
from saccade.models.preprocessing.processor_config import CHANNELS
from saccade.protocol.media import ImageLayout


class Layout(FixedSizeLayout):
    """The layout of LLaVA-1.5 (one square view) and LLaVA-NeXT (a base view, then tiles in higher resolution)."""

    def __init__(self, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> None:
        self.settings: Mapping[str, Any] = resolve(config, preprocessor)

    def low_detail(self) -> Mapping[str, Any]:
        """Return the pinpoints with the least area, or None if the model has none."""
        return {"pinpoints": self.settings["pinpoints"] and tiles.smallest(self.settings["pinpoints"])}

    def image(self, width: int, height: int, settings: Mapping[str, Any]) -> ImageLayout:
        """Return grid (1, rows, columns), tokens, and the shape of the views: [3, s, s], or [1 + tiles, 3, s, s]."""
        return image_layout(width, height, settings)


def image_layout(width: int, height: int, settings: Mapping[str, Any]) -> ImageLayout:
    """Return the layout of an upright image.

    The grid and the resized size describe the square view or, with pinpoints, the padded image of all tiles.
    """
    side, pinpoints = settings["image_size"], settings["pinpoints"]
    view = side // settings["patch_size"]
    base_tokens = view * view + settings["has_class_token"]
    if pinpoints is None:
        return ImageLayout(
            resized_height=side,
            resized_width=side,
            grid=(1, view, view),
            num_tokens=base_tokens,
            pixel_shape=(CHANNELS, side, side),
        )
    full_height, full_width = tiles.best_resolution(height, width, pinpoints)
    rows, columns = full_height // side * view, full_width // side * view
    return ImageLayout(
        resized_height=full_height,
        resized_width=full_width,
        grid=(1, rows, columns),
        num_tokens=base_tokens + tiles.num_features(tiles.unpadded(height, width, rows, columns)),
        pixel_shape=(1 + rows * columns // view**2, CHANNELS, side, side),
        original_size=(height, width),
    )

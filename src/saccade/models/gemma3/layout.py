"""Returns an image's size, tokens and text, which are the same for all images. Runs in the gateway, without torch.

Source of the rules: transformers 5.23, models/gemma3/image_processing_gemma3.py and processing_gemma3.py.
"""

from collections.abc import Mapping
from typing import Any

from saccade.models.gemma3 import FAMILY
from saccade.models.gemma3.settings import resolve
from saccade.models.preprocessing.own_wire import FixedSizeLayout
from saccade.models.preprocessing.processor_config import CHANNELS
from saccade.protocol.media import ImageLayout

BEGIN, END = FAMILY.template_mark or "", "<end_of_image>"
BREAK = "\n\n"
"""The text before and after an image; its tokens may join those of the text around it."""


class Layout(FixedSizeLayout):
    """The layout of an image that is resized to a square, whatever its shape."""

    def __init__(self, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> None:
        self.settings: Mapping[str, Any] = resolve(config, preprocessor)

    def low_detail(self) -> Mapping[str, Any]:
        """Return no change: an image already has few tokens."""
        return {}

    def image(self, width: int, height: int, settings: Mapping[str, Any]) -> ImageLayout:
        """Return grid (1, rows, columns), tokens with the text around them, and the view's shape [1, 3, s, s]."""
        return image_layout(width, height, settings)


def image_layout(width: int, height: int, settings: Mapping[str, Any]) -> ImageLayout:
    """Return the layout of an upright image."""
    edge, num_tokens = settings["image_size"], settings["view_tokens"]
    side = edge // settings["patch_size"]
    return ImageLayout(
        resized_height=edge,
        resized_width=edge,
        grid=(1, side, side),
        num_tokens=num_tokens,
        pixel_shape=(1, CHANNELS, edge, edge),
        prompt=(BREAK, BEGIN, num_tokens, END, BREAK),
    )

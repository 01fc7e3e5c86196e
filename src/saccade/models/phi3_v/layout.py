"""Computes an image's size and token count from its dimensions. Runs in the gateway, without torch.

Source of the rule: HD_transform and calc_num_image_tokens in the release's image_processing_phi3_v.py.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from saccade.errors import ImageTooLarge, StartupError
from saccade.models.preprocessing import processor_config
from saccade.models.preprocessing.own_wire import FixedSizeLayout
from saccade.protocol.media import ImageLayout

CROP = 336
PATCH = 14
TOKENS_PER_CROP = 144
TOKENS_PER_SIDE = 12
EMBEDDING: Mapping[str, Any] = {"use_hd_transform": True, "with_learnable_separator": True}
"""The values in config.json's embd_layer that the token count below assumes."""


class Layout(FixedSizeLayout):
    """The layout of Phi-3-vision: a global view of the whole image and crops of 336 x 336, with 144 tokens each."""

    def __init__(self, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> None:
        embedding = config.get("embd_layer") or {}
        for key, value in EMBEDDING.items():
            if embedding.get(key, value) != value:
                raise StartupError(
                    f"config.json sets embd_layer.{key} to {embedding[key]!r}; only {value!r} is supported."
                )
        processor_config.check_fixed(preprocessor, {"num_img_tokens": TOKENS_PER_CROP})
        self.settings: Mapping[str, Any] = {
            "num_crops": processor_config.whole_number(preprocessor.get("num_crops"), "num_crops"),
            **processor_config.colours(preprocessor, processor_config.CLIP_COLOURS),
        }

    def low_detail(self) -> Mapping[str, Any]:
        """Return a limit of one crop."""
        return {"num_crops": 1}

    def image(self, width: int, height: int, settings: Mapping[str, Any]) -> ImageLayout:
        """Return the padded image's grid (1, rows, columns) and shape [3, height, width]. Raises ImageTooLarge."""
        return image_layout(width, height, settings)


class Fitted(NamedTuple):
    """The size of an image whose long side is its width, and its padded height, in pixels."""

    width: int
    height: int
    padded_height: int


def fitted(long: int, short: int, num_crops: int) -> Fitted:
    """Fit an image of *long* x *short* pixels to as many columns of crops as *num_crops* allows; return its size.

    Raises ImageTooLarge if its short side would become 0.
    """
    ratio = long / short
    columns = 1
    while (columns + 1) * math.ceil((columns + 1) / ratio) <= num_crops:
        columns += 1
    width = columns * CROP
    height = int(width / ratio)
    if height < 1:
        raise ImageTooLarge(
            f"The image's sides have {long} and {short} pixels; this model accepts a ratio of at most {width} to 1."
        )
    return Fitted(width, height, math.ceil(height / CROP) * CROP)


def image_layout(width: int, height: int, settings: Mapping[str, Any]) -> ImageLayout:
    """Return the layout of an upright image. Its resized size includes the padding and consists of whole crops."""
    size = fitted(max(width, height), min(width, height), settings["num_crops"])
    resized_width, resized_height = size.width, size.padded_height
    if width < height:
        resized_width, resized_height = resized_height, resized_width
    rows, columns = resized_height // CROP, resized_width // CROP
    return ImageLayout(
        resized_height=resized_height,
        resized_width=resized_width,
        grid=(1, resized_height // PATCH, resized_width // PATCH),
        num_tokens=num_tokens(rows, columns),
        pixel_shape=(processor_config.CHANNELS, resized_height, resized_width),
    )


def num_tokens(rows: int, columns: int) -> int:
    """Return the number of tokens of *rows* x *columns* crops and the global view.

    Every row of features ends with a newline, and there is one separator between the crops and the global view.
    """
    return (rows * columns + 1) * TOKENS_PER_CROP + 1 + (rows + 1) * TOKENS_PER_SIDE

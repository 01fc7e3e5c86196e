"""Turns a decoded image into the wire's view. Runs in a decode process."""

from typing import Any

import numpy as np
import numpy.typing as npt

from saccade.media.resize import resize
from saccade.models.gemma3.layout import image_layout
from saccade.models.preprocessing.decoded import DecodedImage
from saccade.protocol.media import ImageLayout


class Pixels(DecodedImage):
    """Writes the whole image as a square, in uint8 planes [1, 3, s, s]."""

    layout_of = staticmethod(image_layout)

    def fill(self, image: npt.NDArray[np.uint8], layout: ImageLayout, out: npt.NDArray[Any]) -> None:
        """Resize *image* [height, width, 3], and write it into *out*, which has layout.pixel_shape."""
        out[0] = resize(image, layout.resized_height, layout.resized_width, "bilinear")

    def to_image(self, patches: npt.NDArray[np.uint8], layout: ImageLayout) -> npt.NDArray[np.uint8]:
        """Return the view [s, s, 3]."""
        return np.concatenate(patches.reshape(layout.pixel_shape).transpose(0, 2, 3, 1))

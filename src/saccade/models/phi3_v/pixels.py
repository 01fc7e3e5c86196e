"""Turns a decoded image into the wire's padded image. Runs in a decode process."""

from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from saccade.media.resample import resample
from saccade.models.phi3_v.layout import fitted, image_layout
from saccade.models.preprocessing.decoded import DecodedImage
from saccade.protocol.media import ImageLayout

WHITE = 255


class Pixels(DecodedImage):
    """Writes Phi-3-vision's padded image as uint8 planes; the engine makes its global view and its crops.

    Source: HD_transform and padding_336 in the release's image_processing_phi3_v.py.
    """

    layout_of = staticmethod(image_layout)

    def fill(self, image: npt.NDArray[np.uint8], layout: ImageLayout, out: npt.NDArray[Any]) -> None:
        """Resize *image* [height, width, 3], and write it on white into *out* [3, padded height, padded width]."""
        height, width, _ = image.shape
        planes = out.transpose(1, 2, 0)
        if width < height:
            # The reference first rotates a tall image, so its passes have the other order.
            image, planes = image.transpose(1, 0, 2), planes.transpose(1, 0, 2)
        size = fitted(image.shape[1], image.shape[0], self._settings["num_crops"])
        top = (size.padded_height - size.height) // 2
        planes[:top] = WHITE
        planes[top : top + size.height] = resample(image, size.height, size.width, Image.Resampling.BILINEAR)
        planes[top + size.height :] = WHITE

    def to_image(self, patches: npt.NDArray[np.uint8], layout: ImageLayout) -> npt.NDArray[np.uint8]:
        """Return the padded image [height, width, 3]."""
        return patches.transpose(1, 2, 0)

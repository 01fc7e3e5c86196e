"""Turns a decoded image into the wire's views. Runs in a decode process.

Source: transformers 5.23, models/idefics3/image_processing_idefics3.py, with the torchvision backend.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from saccade.media.resize import resize
from saccade.models.preprocessing.tiles import ViewImage, write_views
from saccade.models.smolvlm.layout import fitted, image_layout
from saccade.protocol.media import ImageLayout


class Pixels(ViewImage):
    """Writes views as uint8 planes [3, s, s]: the tiles by rows, if any, then the whole image.

    As in the reference, each resize starts from the previous result, rounded to uint8: the longest edge, then whole
    tiles, then the whole image.
    """

    layout_of = staticmethod(image_layout)

    def fill(self, image: npt.NDArray[np.uint8], layout: ImageLayout, out: npt.NDArray[Any]) -> None:
        """Write the views of *image* [height, width, 3] into *out*, which has layout.pixel_shape."""
        height, width, _ = image.shape
        image = self._resized(image, *fitted(height, width, self._settings["longest_edge"]))
        tiled = self._resized(image, layout.resized_height, layout.resized_width)
        side = out.shape[-1]
        write_views(tiled, self._resized(tiled, side, side), out)

    def _resized(self, image: npt.NDArray[np.uint8], height: int, width: int) -> npt.NDArray[np.uint8]:
        """Return *image* [old height, old width, 3] as [*height*, *width*, 3]."""
        return resize(image, height, width, self._settings["filter"]).transpose(1, 2, 0)

"""Turns a decoded image or video into the wire's views. Runs in a decode process.

Source: transformers 5.23, models/got_ocr2/image_processing_got_ocr2.py, with the torchvision backend, and
models/internvl/video_processing_internvl.py.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from saccade.media.resize import resize
from saccade.models.internvl.layout import image_layout
from saccade.models.preprocessing.decoded import DecodedVideo
from saccade.models.preprocessing.tiles import ViewImage, write_views
from saccade.protocol.media import ImageLayout


class Pixels(ViewImage):
    """Writes views as uint8 planes [3, s, s]: the tiles row by row, then the whole image, or only the whole image."""

    layout_of = staticmethod(image_layout)

    def fill(self, image: npt.NDArray[np.uint8], layout: ImageLayout, out: npt.NDArray[Any]) -> None:
        """Write the views of *image* [height, width, 3]."""
        side = out.shape[-1]
        whole = resize(image, side, side).transpose(1, 2, 0)
        tiled = whole
        if len(out) > 1:
            tiled = resize(image, layout.resized_height, layout.resized_width).transpose(1, 2, 0)
        write_views(tiled, whole, out)


class VideoPixels(DecodedVideo):
    """Writes one view, uint8 planes [3, s, s], for each frame."""

    def fill(self, frame: npt.NDArray[np.uint8], number: int, layout: ImageLayout, out: npt.NDArray[np.uint8]) -> None:
        out[number] = resize(frame, self._settings["tile"], self._settings["tile"])

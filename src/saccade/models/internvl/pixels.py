"""A decoded image or video to the views of the wire. Runs in a decode process.

Source: transformers 5.23, models/got_ocr2/image_processing_got_ocr2.py, with the torchvision backend, and
models/internvl/video_processing_internvl.py.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from saccade.errors import InternalError
from saccade.media.resize import resize
from saccade.models.internvl.layout import image_layout
from saccade.models.preprocessing.decoded_size import check_decoded
from saccade.models.preprocessing.tiles import ViewImage, write_views
from saccade.protocol.media import ImageLayout


class Pixels(ViewImage):
    """Views of uint8 planes [3, s, s]: the tiles by rows, then the whole image; or that alone."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings

    def write(self, image: npt.NDArray[np.uint8], layout: ImageLayout, out: npt.NDArray[Any]) -> None:
        """Write the views of *image* [height, width, 3] into *out* of layout.pixel_shape.

        Raises InternalError if *layout* is for another size, MemoryError if an allocation fails.
        """
        height, width, _ = image.shape
        check_decoded(image_layout(width, height, self._settings), layout)
        side = out.shape[-1]
        whole = resize(image, side, side).transpose(1, 2, 0)
        tiled = whole
        if len(out) > 1:
            tiled = resize(image, layout.resized_height, layout.resized_width).transpose(1, 2, 0)
        write_views(tiled, whole, out)


class VideoPixels:
    """A view of uint8 planes [3, s, s] for each frame."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._side = settings["tile"]

    def write(self, frames: Iterable[npt.NDArray[np.uint8]], layout: ImageLayout, out: npt.NDArray[np.uint8]) -> None:
        """Write the views of *frames* into *out* of layout.pixel_shape, one frame at a time.

        Raises InternalError if there are more or fewer frames than in *layout*.
        """
        count = 0
        for frame in frames:
            if count < len(out):
                out[count] = resize(frame, self._side, self._side)
            count += 1
        if count != len(layout.frames):
            raise InternalError(f"A video gave {count} frames instead of {len(layout.frames)}.")

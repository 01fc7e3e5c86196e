"""Turns a decoded image into the wire's views. Runs in a decode process.

Sources: transformers 5.23, models/clip/image_processing_clip.py and models/llava_next/image_processing_llava_next.py,
with their torchvision backend.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from saccade.media.resize import resize
from saccade.models.llava import tiles
from saccade.models.llava.layout import image_layout
from saccade.models.preprocessing.decoded import DecodedImage
from saccade.protocol.media import ImageLayout


class Pixels(DecodedImage):
    """Writes views as uint8 planes [3, s, s]: just one or, with pinpoints, the base view and then the tiles by rows."""

    layout_of = staticmethod(image_layout)

    def fill(self, image: npt.NDArray[np.uint8], layout: ImageLayout, out: npt.NDArray[Any]) -> None:
        """Write the views of *image* [height, width, 3] into *out*, which has layout.pixel_shape."""
        side = self._settings["image_size"]
        if layout.original_size is None:
            out[...] = cropped(image, self._settings["shortest_edge"], side)
        else:
            out[0] = resize(image, side, side)
            write_tiles(image, (layout.resized_height, layout.resized_width), out[1:])

    def to_image(self, patches: npt.NDArray[np.uint8], layout: ImageLayout) -> npt.NDArray[np.uint8]:
        """Return the views side by side, [side, views * side, 3]."""
        return np.concatenate(patches.reshape(-1, *patches.shape[-3:]).transpose(0, 2, 3, 1), axis=1)


def cropped(image: npt.NDArray[np.uint8], shortest_edge: int, side: int) -> npt.NDArray[np.uint8]:
    """Return the middle of *image* [height, width, 3], resized to *shortest_edge*, as planes [3, *side*, *side*]."""
    height, width, _ = image.shape
    short, long = min(height, width), max(height, width)
    longest_edge = int(shortest_edge * long / short)
    size = (shortest_edge, longest_edge) if height <= width else (longest_edge, shortest_edge)
    planes = resize(image, *size)
    top, left = ((length - side) // 2 for length in size)
    return planes[:, top : top + side, left : left + side]


def write_tiles(image: npt.NDArray[np.uint8], resolution: tuple[int, int], out: npt.NDArray[np.uint8]) -> None:
    """Fit *image* [height, width, 3] into *resolution* on black, and write it into *out* [tiles, 3, s, s] by rows."""
    full_height, full_width = resolution
    side = out.shape[-1]
    height, width = tiles.fitted(image.shape[0], image.shape[1], resolution)
    top, left = (full_height - height) // 2, (full_width - width) // 2
    canvas = np.zeros((3, full_height, full_width), np.uint8)
    canvas[:, top : top + height, left : left + width] = resize(image, height, width)
    rows, columns = full_height // side, full_width // side
    target = out.reshape((rows, columns, 3, side, side), copy=False)
    target[...] = canvas.reshape(3, rows, side, columns, side).transpose(1, 3, 0, 2, 4)

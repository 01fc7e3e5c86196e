"""Turns a decoded image or video into the wire's patches. Runs in a decode process."""

import numpy as np
import numpy.typing as npt
from PIL import Image

from saccade.errors import InternalError
from saccade.media.resample import resample
from saccade.models.preprocessing.decoded import DecodedVideo
from saccade.models.preprocessing.navit_layout import image_layout, resized
from saccade.models.preprocessing.navit_pixels import NavitPixels, write_patches
from saccade.protocol.media import ImageLayout


class Pixels(NavitPixels):
    """Writes the patches of RGB images: this family does not keep alpha."""


class VideoPixels(DecodedVideo):
    """Writes uint8 patches, one frame after the other, each laid out like an image's."""

    def fill(self, frame: npt.NDArray[np.uint8], number: int, layout: ImageLayout, out: npt.NDArray[np.uint8]) -> None:
        """Write the patches of *frame*. Raises InternalError unless it has the size in *layout*."""
        height, width, _ = frame.shape
        if image_layout(width, height, self._settings).grid[1:] != layout.grid[1:]:
            raise InternalError("A frame's size differs from the size for which the video's tokens were counted.")
        small = resample(frame, *resized(width, height, self._settings), Image.Resampling.BICUBIC)
        write_patches(small, layout, out.reshape(len(layout.frames), -1, *layout.pixel_shape[1:], copy=False)[number])

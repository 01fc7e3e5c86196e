"""A decoded image or video to the patches of the wire. Runs in a decode process."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from saccade.errors import InternalError
from saccade.media.resample import resample
from saccade.models.preprocessing.navit_layout import image_layout, resized
from saccade.models.preprocessing.navit_pixels import NavitPixels, write_patches
from saccade.protocol.media import ImageLayout


class Pixels(NavitPixels):
    """The releases' images are RGB."""


class VideoPixels:
    """uint8 patches of the frames, one frame after the other, each as an image's."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings

    def write(self, frames: Iterable[npt.NDArray[np.uint8]], layout: ImageLayout, out: npt.NDArray[np.uint8]) -> None:
        """Write the patches of *frames* into *out* of layout.pixel_shape, one frame at a time.

        Raises InternalError if there are more or fewer frames than in *layout*, or if they have another size.
        """
        targets = out.reshape(len(layout.frames), -1, *layout.pixel_shape[1:], copy=False)
        count = 0
        for frame in frames:
            height, width, _ = frame.shape
            if image_layout(width, height, self._settings).grid[1:] != layout.grid[1:]:
                raise InternalError("A frame's size differs from the size for which the video's tokens were counted.")
            small = resample(frame, *resized(width, height, self._settings), Image.Resampling.BICUBIC)
            write_patches(small, layout, targets[count])
            count += 1
        if count != len(layout.frames):
            raise InternalError(f"A video gave {count} frames instead of {len(layout.frames)}.")

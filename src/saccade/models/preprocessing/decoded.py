"""Checks decoded images' sizes and videos' frame counts against the layouts that counted their tokens.

Does not import torch.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from saccade.errors import InternalError
from saccade.protocol.media import ImageLayout

OF_SIZE = ("resized_height", "resized_width", "grid", "num_tokens", "original_size")
"""The fields of a layout that depend on an image's size, and on no wire."""


class DecodedImage:
    """Implements models.family.Pixels except for `to_image`. A family adds `fill` and its layout rule, `layout_of`."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings

    @staticmethod
    def layout_of(width: int, height: int, settings: Mapping[str, Any]) -> ImageLayout:
        """Return the layout of an image."""
        raise NotImplementedError

    def fill(self, image: npt.NDArray[np.uint8], layout: ImageLayout, out: npt.NDArray[Any]) -> None:
        """Write the pixels of *image*, which has *layout*, into *out*."""
        raise NotImplementedError

    def write_pixels(self, image: npt.NDArray[np.uint8], layout: ImageLayout, out: npt.NDArray[Any]) -> None:
        """Write the pixels of *image* [height, width, channels] into *out*, which has layout.pixel_shape.

        Raises InternalError if *layout* is for another size, and MemoryError if an allocation fails.
        """
        height, width, _ = image.shape
        own = self.layout_of(width, height, self._settings)
        if any(getattr(own, name) != getattr(layout, name) for name in OF_SIZE):
            raise InternalError("The image's decoded size differs from the size for which its tokens were counted.")
        self.fill(image, layout, out)


class DecodedVideo:
    """Implements models.family.VideoPixels. A family adds `fill`."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings

    def fill(self, frame: npt.NDArray[np.uint8], number: int, layout: ImageLayout, out: npt.NDArray[np.uint8]) -> None:
        """Write the pixels of *frame*, number *number* of layout.frames, into *out*, which holds the whole video."""
        raise NotImplementedError

    def write_pixels(
        self, frames: Iterable[npt.NDArray[np.uint8]], layout: ImageLayout, out: npt.NDArray[np.uint8]
    ) -> None:
        """Write the pixels of *frames* into *out*, which has layout.pixel_shape, one frame at a time.

        Raises InternalError if there are more or fewer frames than in *layout*.
        """
        count = 0
        for frame in frames:
            if count < len(layout.frames):
                self.fill(frame, count, layout, out)
            count += 1
        if count != len(layout.frames):
            raise InternalError(f"A video gave {count} frames instead of {len(layout.frames)}.")

"""Turns a decoded image into Kimi's patches on the wire. Runs in a decode process."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from saccade.media.resample import resample
from saccade.models.preprocessing.decoded import DecodedImage
from saccade.models.preprocessing.navit_layout import image_layout, resized
from saccade.models.preprocessing.normalisation import bfloat16
from saccade.protocol.media import ImageLayout


class NavitPixels(DecodedImage):
    """Implements models.family.Pixels for patches of [3, 14, 14] in raster order.

    They are uint8 on Saccade's wire, and normalised on external ones.
    """

    layout_of = staticmethod(image_layout)

    def fill(self, image: npt.NDArray[np.uint8], layout: ImageLayout, out: npt.NDArray[Any]) -> None:
        """Write the patches of *image* [height, width, channels]."""
        height, width, _ = image.shape
        small = self.opaque(resample(image, *resized(width, height, self._settings), Image.Resampling.BICUBIC))
        if layout.pixel_dtype == "uint8":
            write_patches(small, layout, out)
        else:
            patches = np.empty(layout.pixel_shape, np.uint8)
            write_patches(small, layout, patches)
            self._normalise(patches, layout, out)

    def opaque(self, image: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Return the resized *image* without alpha. Here it is *image* itself, for families that do not keep alpha."""
        return image

    def to_image(self, patches: npt.NDArray[np.uint8], layout: ImageLayout) -> npt.NDArray[np.uint8]:
        """Return the padded image [height, width, 3] that *patches* show."""
        _, rows, columns = layout.grid
        grid = patches.reshape(rows, columns, *layout.pixel_shape[1:])
        return grid.transpose(0, 3, 1, 4, 2).reshape(layout.resized_height, layout.resized_width, -1)

    def _normalise(self, patches: npt.NDArray[np.uint8], layout: ImageLayout, out: npt.NDArray[Any]) -> None:
        """Write the normalised *patches* into *out*, both of layout.pixel_shape, with one table per channel."""
        tables = self._tables(layout.pixel_dtype)
        _, rows, columns = layout.grid
        for row in range(rows):
            # A row of patches at a time stays in the processor's cache. No index is out of range, so nothing is
            # clipped.
            band = slice(row * columns, (row + 1) * columns)
            for channel, table in enumerate(tables):
                np.take(table, patches[band, channel], out=out[band, channel], mode="clip")

    def _tables(self, dtype: str) -> npt.NDArray[Any]:
        """Return a table [3, 256] with the normalised value of each byte: float32, or bfloat16 as uint16.

        Source of the arithmetic: normalize in the release's media_utils.py, which computes in float64 and rounds to
        float32 after each step.
        """
        mean, std = (np.asarray(self._settings[key], np.float64)[:, None] for key in ("image_mean", "image_std"))
        scaled = (np.arange(256) / 255.0).astype(np.float32)
        centred = (scaled - mean).astype(np.float32)
        values: npt.NDArray[np.float32] = (centred * (1.0 / std)).astype(np.float32)
        return values if dtype == "float32" else bfloat16(values)


def write_patches(image: npt.NDArray[np.uint8], layout: ImageLayout, out: npt.NDArray[np.uint8]) -> None:
    """Write *image* [height, width, 3] as one frame's patches into *out*, with zeros as padding. Both are uint8.

    Whole patches take one strided copy; partial patches at the edges take one for each edge and the corner.
    """
    _, rows, columns = layout.grid
    patch = layout.pixel_shape[-1]
    height, width, channels = image.shape
    target = out.reshape((rows, columns, channels, patch, patch), copy=False)
    target[height // patch :] = 0
    target[:, width // patch :] = 0
    for first_row, num_rows, tall in _runs(height, patch):
        for first_column, num_columns, wide in _runs(width, patch):
            top, left = first_row * patch, first_column * patch
            piece = image[top : top + num_rows * tall, left : left + num_columns * wide]
            blocks = piece.reshape(num_rows, tall, num_columns, wide, channels).transpose(0, 2, 4, 1, 3)
            reached = target[first_row : first_row + num_rows, first_column : first_column + num_columns]
            reached[..., :tall, :wide] = blocks


def _runs(length: int, patch: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first patch, number of patches, pixels in each) along a side: the whole patches, then the partial one."""
    whole, rest = divmod(length, patch)
    if whole:
        yield 0, whole, patch
    if rest:
        yield whole, 1, rest

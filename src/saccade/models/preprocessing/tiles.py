"""Writes an image's square tiles, then the whole image as another view, or only the whole image.

Does not import torch.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from saccade.models.preprocessing.decoded import DecodedImage
from saccade.protocol.media import ImageLayout


def num_views(rows: int, columns: int) -> int:
    """Return the number of views: the tiles and the whole image, or just the whole image if there is one tile."""
    return 1 if rows == columns == 1 else rows * columns + 1


def write_views(tiled: npt.NDArray[np.uint8], whole: npt.NDArray[np.uint8], out: npt.NDArray[Any]) -> None:
    """Write the tiles of *tiled* [height, width, 3] by rows, then *whole* [s, s, 3], into *out* [V, 3, s, s]."""
    side = out.shape[-1]
    rows, columns = tiled.shape[0] // side, tiled.shape[1] // side
    if len(out) > 1:
        target = out[:-1].reshape((rows, columns, 3, side, side), copy=False)
        target[...] = tiled.reshape(rows, side, columns, side, 3).transpose(0, 2, 4, 1, 3)
    out[-1] = whole.transpose(2, 0, 1)


class ViewImage(DecodedImage):
    """Implements models.family.Pixels for images made of views. A family adds `layout_of` and `fill`."""

    def to_image(self, patches: npt.NDArray[np.uint8], layout: ImageLayout) -> npt.NDArray[np.uint8]:
        """Return the views side by side, [side, views * side, 3]."""
        return np.concatenate(patches.transpose(0, 2, 3, 1), axis=1)

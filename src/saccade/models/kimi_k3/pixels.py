"""Turns a decoded image into the wire's patches. Runs in a decode process."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from saccade.models.kimi_k3.layout import BOARD
from saccade.models.preprocessing.navit_pixels import NavitPixels

BAND_ROWS = 64


class Pixels(NavitPixels):
    """Writes Kimi-K3's patches. Transparent images are composited on a chessboard after they are resized."""

    def opaque(self, image: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Return *image* [height, width, 3 or 4], composited on the board, as [height, width, 3].

        The arithmetic, float32 and rounded down, follows fill_transparent_bg_with in the release's media_utils.py.
        """
        height, width, channels = image.shape
        if channels == 3:
            return image
        board = _board(height, width, self._settings[BOARD])
        opaque = np.empty((height, width, 3), np.uint8)
        for top in range(0, height, BAND_ROWS):
            band = slice(top, top + BAND_ROWS)
            alpha = image[band, :, 3:].astype(np.float32) / np.float32(255)
            opaque[band] = alpha * image[band, :, :3] + (1 - alpha) * board[band, :, None]
        return opaque


def _board(height: int, width: int, settings: Mapping[str, Any]) -> npt.NDArray[np.uint8]:
    """Return the shades [height, width] of the board."""
    rows, columns = (np.arange(side) // settings["chessboard_square_size"] for side in (height, width))
    is_gray = (rows[:, None] + columns) % 2 == int(settings["chessboard_square_on_top_left"])
    shades = settings["chessboard_gray_value"], settings["chessboard_white_value"]
    return np.where(is_gray, *map(np.uint8, shades))

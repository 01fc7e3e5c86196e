"""Positions of tokens: plain, or on three axes as used by the rotary embedding of Qwen's models (M-RoPE). No torch.

Source: transformers, modeling_qwen2_vl.py, get_rope_index.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class _Media(NamedTuple):
    """Prompt tokens [start, stop) show a grid of (time, height, width) tokens; *base* is its first position."""

    start: int
    stop: int
    base: int
    grid: tuple[int, int, int]


class PlainPositions:
    """A token's position is its index, on all axes."""

    delta = 0
    allow_split_media = True

    def slice(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the positions [3, stop - start] of tokens [start, stop)."""
        return np.broadcast_to(np.arange(start, stop), (3, stop - start))


class MultimodalPositions:
    """Positions of a whole sequence, prompt and answer, on three axes.

    Text advances all axes by one per token. A picture's tokens have positions base + their place in the grid, and the
    text after it continues at the largest used position + 1. After the last picture, position = index + *delta*.
    """

    allow_split_media = False

    def __init__(self, spans: Sequence[tuple[int, tuple[int, int, int]]]) -> None:
        """*spans* are (index of the first token, grid in tokens), in prompt order."""
        self.delta = 0
        self._media: list[_Media] = []
        for start, (time, height, width) in spans:
            stop = start + time * height * width
            self._media.append(_Media(start, stop, start + self.delta, (time, height, width)))
            self.delta += max(time, height, width) - (stop - start)

    def slice(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the positions [3, stop - start] of tokens [start, stop), which may lie after the prompt."""
        positions = np.empty((3, stop - start), dtype=np.int64)
        cursor = start
        for media in self._media:
            if media.stop <= cursor:
                continue
            if media.start >= stop:
                positions[:, cursor - start :] = np.arange(cursor, stop) + (media.base - media.start)
                return positions
            if media.start > cursor:
                text = slice(cursor - start, media.start - start)
                positions[:, text] = np.arange(cursor, media.start) + (media.base - media.start)
                cursor = media.start
            end = min(media.stop, stop)
            index = np.unravel_index(np.arange(cursor - media.start, end - media.start), media.grid)
            positions[:, cursor - start : end - start] = np.stack(index) + media.base
            cursor = end
        positions[:, cursor - start :] = np.arange(cursor, stop) + self.delta
        return positions

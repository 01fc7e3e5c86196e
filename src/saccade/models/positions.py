"""Token positions: plain, or on three axes, as in the rotary embedding of Qwen's models (M-RoPE).

Does not import torch.

Source: transformers, modeling_qwen2_vl.py and modeling_qwen2_5_vl.py, get_rope_index.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class GridSpan(NamedTuple):
    """A run of tokens, beginning at *start*, that shows a grid of (time, height, width) tokens.

    On the time axis, grid points are *time_step* apart, rounded down.
    """

    start: int
    grid: tuple[int, int, int]
    time_step: float = 1.0

    @property
    def length(self) -> int:
        """The number of tokens."""
        return prod(self.grid)

    @property
    def times(self) -> npt.NDArray[np.int64]:
        """Positions [time] on the time axis, from 0, computed in float32 as in the reference."""
        return (np.arange(self.grid[0], dtype=np.float32) * np.float32(self.time_step)).astype(np.int64)

    @property
    def extent(self) -> int:
        """The largest position on any axis, plus 1."""
        return max(int(self.times[-1]) + 1, *self.grid[1:])


class _Media(NamedTuple):
    """Prompt tokens [start, stop) show *span*; *base* is its first position."""

    start: int
    stop: int
    base: int
    span: GridSpan


class PlainPositions:
    """A token's position is its index, on all axes."""

    delta = 0

    def slice(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the positions [3, stop - start] of tokens [start, stop)."""
        return np.broadcast_to(np.arange(start, stop), (3, stop - start))


class MultimodalPositions:
    """Positions of a whole sequence, prompt and answer, on three axes.

    Text advances all axes by one per token. The tokens of an image or video have positions base + their place in the
    grid. The text after it continues at the largest used position + 1. After the last image or video, position = index
    + *delta*.
    """

    def __init__(self, spans: Sequence[GridSpan]) -> None:
        """*spans* are in prompt order and do not overlap."""
        self.delta = 0
        self._media: list[_Media] = []
        for span in spans:
            self._media.append(_Media(span.start, span.start + span.length, span.start + self.delta, span))
            self.delta += span.extent - span.length

    def slice(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the positions [3, stop - start] of tokens [start, stop), which may be after the prompt."""
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
            tokens = np.arange(cursor - media.start, end - media.start)
            time, row, column = np.unravel_index(tokens, media.span.grid)
            positions[:, cursor - start : end - start] = np.stack((media.span.times[time], row, column)) + media.base
            cursor = end
        positions[:, cursor - start :] = np.arange(cursor, stop) + self.delta
        return positions

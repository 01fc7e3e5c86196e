"""Rotary embeddings (Su et al. 2021, arXiv:2104.09864), 1-D and multimodal.

Multimodal positions have three axes (time, height, width). Formulas: transformers, modeling_qwen3_vl.py
(get_rope_index, recomposition_frequencies) and Qwen2-VL, arXiv:2409.12191, section 2.1.
Shapes: N tokens, H heads, D head size.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch


def inverse_frequencies(theta: float, size: int, device: torch.device) -> torch.Tensor:
    """Return theta^(-2i/size) for i < size / 2, float32."""
    return 1.0 / (theta ** (torch.arange(0, size, 2, dtype=torch.float32, device=device) / size))


def interleaved_axes(section: Sequence[int]) -> list[int]:
    """Return the axis (0 time, 1 height, 2 width) that turns each channel, T H W T H W ... and T for the rest.

    *section* counts the channels of each axis; the caller has checked that they sum to half the head size.
    """
    axes = [0] * sum(section)
    for axis in (1, 2):
        for channel in range(axis, 3 * section[axis], 3):
            axes[channel] = axis
    return axes


def rotation(angles: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine [N, 1, D] for `rotate`, from float32 angles [N, D / 2]; half of sine is negated.

    Raises ValueError for angles of another shape: three axes must have become one angle a channel before.
    """
    if angles.ndim != 2:
        raise ValueError(f"A rotation takes one angle for each token and channel, [N, D / 2], not {[*angles.shape]}.")
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).unsqueeze(1).to(dtype), torch.cat((-sin, sin), -1).unsqueeze(1).to(dtype)


def rotate(x_NHD: torch.Tensor, cos_N1D: torch.Tensor, sin_N1D: torch.Tensor) -> torch.Tensor:
    """Turn channel pairs (i, i + D/2) of every head by the angles of `rotation`."""
    return torch.addcmul(x_NHD * cos_N1D, x_NHD.roll(x_NHD.shape[-1] // 2, -1), sin_N1D)


def pair_rotation(angles_NC: torch.Tensor) -> torch.Tensor:
    """Return the complex numbers [N, 1, D / 2] for `rotate_pairs`, from float32 angles [N, D / 2]."""
    return torch.polar(torch.ones_like(angles_NC), angles_NC).unsqueeze(1)


def rotate_pairs(x_NHD: torch.Tensor, turn_N1C: torch.Tensor) -> torch.Tensor:
    """Turn channel pairs (2i, 2i + 1) of every head, in float32: a pair is a complex number, and so is its turn."""
    pairs = torch.view_as_complex(x_NHD.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn_N1C).flatten(-2).to(x_NHD.dtype)


class _Media(NamedTuple):
    """Prompt tokens [start, stop) show a grid of (time, height, width) tokens; *base* is its first position."""

    start: int
    stop: int
    base: int
    grid: tuple[int, int, int]


class MultimodalPositions:
    """Positions of a whole sequence, prompt and answer, on three axes.

    Text advances all axes by one a token. A picture's tokens stand at base + their place in the grid, and the text
    behind it goes on at the largest position used + 1. Behind the last picture, position = index + *delta*.
    """

    def __init__(self, spans: Sequence[tuple[int, tuple[int, int, int]]]) -> None:
        """*spans* are (index of the first token, grid in tokens), in prompt order."""
        self.delta = 0
        self._media: list[_Media] = []
        for start, (time, height, width) in spans:
            stop = start + time * height * width
            self._media.append(_Media(start, stop, start + self.delta, (time, height, width)))
            self.delta += max(time, height, width) - (stop - start)

    def slice(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the positions [3, stop - start] of tokens [start, stop), which may lie behind the prompt."""
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

"""Writes pixels as patches in merged blocks directly to memory that a worker reads. Uses numpy, not torch.

It writes one row of blocks at a time, so that intermediate data stays in the processor's cache.

Names: P patch_size, M merge_size, F temporal_patch_size. A row of blocks has M * P rows of pixels and N patches.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from saccade.media import rgbx
from saccade.models.preprocessing import normalisation
from saccade.models.preprocessing.processor_config import CHANNELS

Bands = Callable[[int], npt.NDArray[np.uint8]]
"""Returns the pixels [3, M * P, width] of a row of blocks, by its number. The next call may overwrite them."""


def bands_of_planes(planes: npt.NDArray[np.uint8], height: int) -> Bands:
    """Return the bands, *height* rows each, of *planes* [3, rows, width]."""
    return lambda index: planes[:, index * height : (index + 1) * height]


def bands_of_words(memory: npt.NDArray[np.uint8], height: int) -> Bands:
    """Return the bands, *height* rows each, of an image in *memory* [rows, width, 4]."""
    band = np.empty((CHANNELS, height, memory.shape[1]), np.uint8)

    def split(index: int) -> npt.NDArray[np.uint8]:
        rgbx.split(memory[index * height : (index + 1) * height], band)
        return band

    return split


def write_patches(bands: Bands, settings: Mapping[str, Any], out: npt.NDArray[np.uint8], columns: int) -> None:
    """Write *bands* into *out* [patches, 3 * P * P], both uint8; a row of blocks has *columns* blocks.

    Patches follow merged blocks: (rows / M, columns / M, M, M); each holds (channel, P, P).
    """
    patch, merge = settings["patch_size"], settings["merge_size"]
    word = _word(patch)
    target = out.view(word).reshape((-1, columns, merge, merge, CHANNELS, patch, patch // word.itemsize), copy=False)
    for index, row in enumerate(target):
        blocks = bands(index).view(word).reshape(CHANNELS, merge, patch, columns, merge, -1)
        row[...] = blocks.transpose(3, 1, 4, 0, 2, 5)


def write_normalised(
    bands: Bands, settings: Mapping[str, Any], dtype: str, out: npt.NDArray[Any], columns: int
) -> None:
    """Write *bands* into *out* [patches, 3 * F * P * P]: float32, or bfloat16 as uint16.

    *columns* is as in write_patches(). Values are (x - mean * 255) / (std * 255) in float32, as the reference processor
    computes them. They are looked up two by two, so P * M must be even. All frames of a patch are the same.
    """
    patch, merge, frames = settings["patch_size"], settings["merge_size"], settings["temporal_patch_size"]
    tables = normalisation.pair_tables(settings["image_mean"], settings["image_std"], dtype)
    num_patches, area, word = columns * merge * merge, patch * patch, _word(patch)
    patches = np.empty((CHANNELS, columns, merge, merge, patch, patch), np.uint8)
    values = np.empty((CHANNELS, num_patches, area), out.dtype)
    pairs, value_pairs = patches.reshape(CHANNELS, -1).view("<u2"), values.reshape(CHANNELS, -1).view(tables[0].dtype)
    target = out.reshape((-1, num_patches, CHANNELS, frames, area), copy=False)
    for index, row in enumerate(target):
        blocks = bands(index).view(word).reshape(CHANNELS, merge, patch, columns, merge, -1)
        patches.view(word)[...] = blocks.transpose(0, 3, 1, 4, 2, 5)
        for channel, table in enumerate(tables):
            # With "clip" the look-up makes no copy; no index is out of range.
            table.take(pairs[channel], out=value_pairs[channel], mode="clip")
        row[...] = values.transpose(1, 0, 2)[:, :, None]


def _word(num_bytes: int) -> np.dtype[Any]:
    """Return the largest word whose size divides *num_bytes*: numpy copies word by word."""
    size = np.gcd(num_bytes, 16)
    return np.dtype({16: np.complex128, 8: np.uint64, 4: np.uint32, 2: np.uint16, 1: np.uint8}[int(size)])

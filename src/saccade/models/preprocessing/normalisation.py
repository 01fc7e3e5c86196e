"""Tables that map uint8 to the normalised values of external wires, 256 per channel. Uses numpy, not torch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

HALF = np.uint32(0x7FFF)


def tables(mean: Sequence[float], std: Sequence[float], dtype: str) -> npt.NDArray[Any]:
    """Return (x - mean * 255) / (std * 255), computed in float32: [channels, 256], float32, or bfloat16 as uint16.

    Source of the arithmetic: transformers 5.23, image_processing_utils_fast.py, fused rescale and normalise.
    """
    scaled_mean, scaled_std = (np.asarray(values, np.float32) * np.float32(255) for values in (mean, std))
    levels = np.arange(256, dtype=np.float32)
    values: npt.NDArray[np.float32] = (levels - scaled_mean[:, None]) / scaled_std[:, None]
    return values if dtype == "float32" else bfloat16(values)


def pair_tables(mean: Sequence[float], std: Sequence[float], dtype: str) -> list[npt.NDArray[Any]]:
    """Return, for each channel, a table that maps two neighbouring bytes, as a little-endian uint16, to two values.

    Each table is [65536], uint32 or uint64, with two values of *dtype* per entry, which halves the number of look-ups.
    Channels with equal normalisation share one table, so that it stays in the processor's cache.
    """
    pairs_of: dict[bytes, npt.NDArray[Any]] = {}
    return [pairs_of.setdefault(table.tobytes(), _pairs(table)) for table in tables(mean, std, dtype)]


def _pairs(table: npt.NDArray[Any]) -> npt.NDArray[Any]:
    pairs = np.empty((256, 256, 2), table.dtype)
    pairs[..., 0], pairs[..., 1] = table[None, :], table[:, None]
    return pairs.reshape(-1).view(f"u{2 * table.itemsize}")


def bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return *values* rounded to the nearest bfloat16, ties to even, as the uint16 with the same bits."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded: npt.NDArray[np.uint16] = ((bits + HALF + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)).astype(
        np.uint16
    )
    return rounded

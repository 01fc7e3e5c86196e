"""uint8 to the normalised values of wires that are not ours: 256 table entries for each channel. numpy, no torch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

HALF = np.uint32(0x7FFF)


def tables(mean: Sequence[float], std: Sequence[float], dtype: str) -> npt.NDArray[Any]:
    """Return [channels, 256]: (x - mean * 255) / (std * 255) in float32; float32, or bfloat16 as uint16.

    Source of the arithmetic: transformers 5.23, image_processing_utils_fast.py, fused rescale and normalise.
    """
    scaled_mean, scaled_std = (np.asarray(values, np.float32) * np.float32(255) for values in (mean, std))
    levels = np.arange(256, dtype=np.float32)
    values: npt.NDArray[np.float32] = (levels - scaled_mean[:, None]) / scaled_std[:, None]
    return values if dtype == "float32" else bfloat16(values)


def bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return *values* rounded to the nearest bfloat16, ties to even, as the uint16 that hold their bits."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded: npt.NDArray[np.uint16] = ((bits + HALF + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)).astype(
        np.uint16
    )
    return rounded

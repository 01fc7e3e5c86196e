"""Converts normalised values from external wires back to their uint8 levels. Uses numpy, not torch.

This inverts `normalisation`: value = (level / 255 - mean) / std. Other programs compute this in another order, so
their values may differ from ours by float32's rounding. A bfloat16 may differ by one place if the value lies between
two.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from saccade.errors import InvalidValue
from saccade.models.preprocessing.normalisation import bfloat16

NUM_LEVELS = 256
NO_LEVEL = np.uint16(NUM_LEVELS)
"""The table's entry for a bfloat16 that no level makes."""

FLOAT32_ERROR = 1e-5
"""The largest difference of a float32 from its level's value: neighbouring levels differ by over 0.007."""

BFLOAT16_ERROR = 0.5 + 2.0**-6
"""The same for a bfloat16, in places: half a place, plus the error of float32 before it is rounded."""

VALUES_AT_A_TIME = 1 << 18
"""Intermediate data of this size stays in the processor's cache."""


class Denormaliser:
    """The inverse of the normalisation with *mean* and *std* per channel, for pixels from 0 to 1."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self._channels = tuple(zip(map(float, mean), map(float, std), strict=True))
        self._tables = [_table(*channel) for channel in self._channels]

    @property
    def takes_bfloat16(self) -> bool:
        """Whether all levels still differ in bfloat16, so that each value identifies its level."""
        levels = np.arange(NUM_LEVELS)
        rounded = (bfloat16(_values(levels, *channel).astype(np.float32)) for channel in self._channels)
        return all(np.array_equal(table[bits], levels) for bits, table in zip(rounded, self._tables, strict=True))

    def levels(self, values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
        """Return the levels of *values* [patches, channels, n]: float32, or bfloat16 as uint16.

        Raises InvalidValue for a value that no level yields.
        """
        levels = np.empty(values.shape, np.uint8)
        rows = max(1, VALUES_AT_A_TIME // max(1, values[0, 0].size if values.size else 1))
        for start in range(0, len(values), rows):
            band = slice(start, start + rows)
            for channel, (mean, std) in enumerate(self._channels):
                band_levels = (
                    self._tables[channel][values[band, channel]]
                    if values.dtype == np.uint16
                    else _nearest(values[band, channel], mean, std, _float32_errors)
                )
                if band_levels.max(initial=0) >= NUM_LEVELS:
                    raise InvalidValue(
                        "A value matches none of a channel's 256 levels under the image_mean and image_std of the "
                        "model's preprocessor_config.json."
                    )
                levels[band, channel] = band_levels
        return levels


def _values(levels: npt.NDArray[np.integer], mean: float, std: float) -> npt.NDArray[np.float64]:
    values: npt.NDArray[np.float64] = (levels / 255 - mean) / std
    return values


def _table(mean: float, std: float) -> npt.NDArray[np.uint16]:
    """Return the level of each of the 65536 bfloat16 values, by its bits; NO_LEVEL for those that no level makes."""
    bits = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    return _nearest(bits.view(np.float32), mean, std, _bfloat16_errors)


def _bfloat16_errors(exact: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Return the largest error of a bfloat16, which has eight significant bits, for each of the *exact* values."""
    places = np.ldexp(1.0, np.frexp(exact)[1] - 8)
    errors: npt.NDArray[np.float64] = BFLOAT16_ERROR * places + 1e-6
    return errors


def _float32_errors(_: npt.NDArray[np.floating]) -> float:
    return FLOAT32_ERROR


def _nearest(
    values: npt.NDArray[np.float32],
    mean: float,
    std: float,
    errors: Callable[[npt.NDArray[np.floating]], npt.NDArray[np.float64] | float],
) -> npt.NDArray[np.uint16]:
    """Return the nearest level of each of *values*, or NO_LEVEL if its value differs by more than *errors* allow."""
    with np.errstate(invalid="ignore", over="ignore"):
        positions = np.clip(np.rint((values * std + mean) * 255), 0, NUM_LEVELS - 1)
        levels = np.nan_to_num(positions).astype(np.uint16)
        exact = _values(levels, mean, std)
        # A comparison with NaN is false.
        matches = np.abs(values - exact) <= errors(exact)
    return np.where(matches, levels, NO_LEVEL)

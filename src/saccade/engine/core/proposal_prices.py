"""What it costs to verify proposed tokens, from the measured times of steps. Does not import torch."""

import math
from bisect import bisect_right, insort
from typing import NamedTuple

RISE = 8
"""A step that took longer than expected counts as one of this many: most such steps waited for something else."""


class StepTimes:
    """The seconds that a step with decodes alone takes, by its number of tokens."""

    def __init__(self) -> None:
        self._counts = [0]
        self._seconds = {0: 0.0}

    def add(self, num_tokens: int, seconds: float) -> None:
        """Add a measured step of at least one token."""
        before = self._seconds.get(num_tokens)
        if before is None:
            insort(self._counts, num_tokens)
        elif seconds > before:
            seconds = before + (seconds - before) / RISE
        self._seconds[num_tokens] = seconds

    def of(self, num_tokens: int) -> float:
        """Return the seconds of a step with *num_tokens*, on the line through the two measured steps next to it.

        No tokens take no time. So if only one number of tokens was measured, each token costs the same.
        """
        counts = self._counts
        high = min(bisect_right(counts, num_tokens), len(counts) - 1)
        if not high:
            return 0.0
        before, after = counts[high - 1], counts[high]
        slope = (self._seconds[after] - self._seconds[before]) / (after - before)
        return self._seconds[before] + slope * (num_tokens - before)

    def prices(self, num_rows: int, num_tokens: int) -> "Prices":
        """Return the prices in a step in which *num_rows* sequences decode, and that has *num_tokens* so far."""
        without = self._seconds.get(num_rows)
        if without is None:
            return Prices(self, num_rows, num_tokens, 0.0, math.inf, num_rows)
        per_second = num_rows / without if without else 0.0
        prices = Prices(self, num_rows, num_tokens, self.of(num_tokens), per_second, 0.0)
        return prices._replace(of_one=prices.of(1))


class Prices(NamedTuple):
    """What proposals add to a step of *num_rows* sequences that has *num_tokens* and takes *seconds* so far.

    The unit is a sequence's step without proposals; *per_second* of them are computed in a second. If no such step was
    measured, prices are the highest.
    """

    times: StepTimes
    num_rows: int
    num_tokens: int
    seconds: float
    per_second: float
    of_one: float

    def of(self, num_more: int) -> float:
        """Return the price of *num_more* proposals, at most as much as a step of all sequences for each of them."""
        highest = float(self.num_rows * num_more)
        if self.per_second == math.inf:
            return highest
        added = self.times.of(self.num_tokens + num_more) - self.seconds
        return min(max(0.0, self.per_second * added), highest)

    def num_covered(self, credit: float, most: int) -> int:
        """Return how many proposals *credit* pays for, at most *most*."""
        return next((count for count in range(most, 0, -1) if self.of(count) <= credit), 0)

"""Finds this gateway's part of the load that a worker reports."""

from collections import deque

LAG_SECONDS = 1.0
"""A worker's report of its load may count samples that ended this long before it."""

KEPT_SECONDS, PERIOD_SECONDS = 60.0, 0.1
"""The oldest usable report of a worker's load, and the resolution of times."""


class OwnSamples:
    """How many samples of this gateway were at a worker at each time in the last KEPT_SECONDS.

    A worker's report of its load is some seconds old. This gateway's samples at that time are its part of the load,
    whatever has begun or ended since; the rest belongs to others.
    """

    def __init__(self) -> None:
        # (period, maximum, count at its end) of each period with a change of the count, the oldest first.
        self._periods: deque[tuple[int, int, int]] = deque()
        self._times: tuple[float, float] | None = None
        self._most = 0

    def note(self, count: int, now: float) -> None:
        """Note *count* samples from *now* on."""
        period, periods = int(now / PERIOD_SECONDS), self._periods
        last, most, at_end = periods[-1] if periods else (-1, 0, 0)
        if last == period:
            periods[-1] = (period, max(count, most), count)
        else:
            periods.append((period, max(count, at_end), count))
        # One older period stays: it has the count at the beginning of the others.
        while len(periods) > 1 and periods[1][0] < period - KEPT_SECONDS / PERIOD_SECONDS:
            periods.popleft()

    def most(self, since: float, until: float) -> int:
        """Return the most samples that a report from between *since* and *until* may count."""
        if (since, until) != self._times:
            self._times = since, until
            first, last = int((since - LAG_SECONDS) / PERIOD_SECONDS), int(until / PERIOD_SECONDS)
            before = [at_end for period, _, at_end in self._periods if period < first]
            within = [most for period, most, _ in self._periods if first <= period <= last]
            self._most = max([0, *before[-1:], *within])
        return self._most

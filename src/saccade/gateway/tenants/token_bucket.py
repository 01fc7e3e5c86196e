"""TokenBucket: an allowance that refills evenly."""

import math
from collections.abc import Callable

SECONDS = 60.0
"""In which an empty bucket fills."""


class TokenBucket:
    """At most *per_minute* units, which refill evenly within a minute; None is no limit. A new bucket is full.

    What is spent may be more than there is: the level is then negative, and the debt is refilled first. *clock* returns
    seconds.
    """

    def __init__(self, per_minute: int | None, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = math.inf if per_minute is None else float(per_minute)
        self._filled_at = clock()

    @property
    def level(self) -> float:
        """Units that are there now; infinite without a limit."""
        if self.per_minute is None:
            return math.inf
        now = self._clock()
        refilled = self._level + (now - self._filled_at) * self.per_minute / SECONDS
        self._level, self._filled_at = min(float(self.per_minute), refilled), now
        return self._level

    @property
    def wait_seconds(self) -> float:
        """Seconds until there is a whole unit, 0 where there is one."""
        return self._seconds_until(1.0)

    @property
    def reset_seconds(self) -> float:
        """Seconds until the bucket is full."""
        return 0.0 if self.per_minute is None else self._seconds_until(float(self.per_minute))

    def spend(self, num_units: int) -> None:
        """Take *num_units*, whether or not they are there; give back, if they are negative."""
        if self.per_minute is not None:
            self._level = self.level - num_units

    def resize(self, per_minute: int | None) -> None:
        """Change the limit. What is left stays, as far as the new limit has room for it."""
        level = self.level
        self.per_minute = per_minute
        self._level = math.inf if per_minute is None else min(level, float(per_minute))
        self._filled_at = self._clock()

    def _seconds_until(self, level: float) -> float:
        if self.per_minute is None:
            return 0.0
        return max(0.0, level - self.level) * SECONDS / self.per_minute

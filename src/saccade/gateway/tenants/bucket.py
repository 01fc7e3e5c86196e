"""Buckets, which hold what is left of a limit per minute."""

import math
from collections.abc import Callable
from typing import Final, Protocol

REFILL_SECONDS: Final = 60.0
"""Time in which an empty bucket fills."""


class Bucket(Protocol):
    """What is left of a limit of *per_minute* units; None means no limit."""

    per_minute: int | None

    @property
    def level(self) -> float:
        """The units left now; infinite without a limit."""

    @property
    def wait_seconds(self) -> float:
        """Seconds until a whole unit is available; 0 if one already is."""

    @property
    def debt_seconds(self) -> float:
        """The same for a request that has begun, and may owe units that others have already taken."""

    @property
    def reset_seconds(self) -> float:
        """Seconds until the bucket is full."""
        return (
            0.0
            if self.per_minute is None
            else max(0.0, self.per_minute - self.level) * REFILL_SECONDS / self.per_minute
        )

    def spend(self, num_units: int) -> None:
        """Take *num_units*, even if fewer are left; a negative number gives units back."""

    def resize(self, per_minute: int | None) -> None:
        """Change the limit. The level stays, up to the new limit."""


class TokenBucket(Bucket):
    """Holds at most *per_minute* units, which refill evenly within a minute; None means no limit.

    A new bucket is full. A caller may spend more than the level, which then becomes negative; *wait_seconds* says how
    long it takes until a unit is available again. *clock* returns seconds.
    """

    def __init__(self, per_minute: int | None, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = math.inf if per_minute is None else float(per_minute)
        self._filled_at = clock()

    @property
    def level(self) -> float:
        if self.per_minute is None:
            return math.inf
        now = self._clock()
        refilled = self._level + (now - self._filled_at) * self.per_minute / REFILL_SECONDS
        self._level, self._filled_at = min(float(self.per_minute), refilled), now
        return self._level

    @property
    def wait_seconds(self) -> float:
        if self.per_minute is None:
            return 0.0
        return max(0.0, 1.0 - self.level) * REFILL_SECONDS / self.per_minute

    debt_seconds = wait_seconds

    def spend(self, num_units: int) -> None:
        if self.per_minute is not None:
            self._level = self.level - num_units

    def resize(self, per_minute: int | None) -> None:
        level = self.level
        self.per_minute = per_minute
        self._level = math.inf if per_minute is None else min(level, float(per_minute))
        self._filled_at = self._clock()

"""Computes how long to wait before a failed operation is tried again."""

import time


class Backoff:
    """Doubles the wait from *first_seconds* to *limit_seconds*; an attempt that lasts *healthy_seconds* resets it."""

    def __init__(self, first_seconds: float = 0.5, limit_seconds: float = 30.0, healthy_seconds: float = 60.0) -> None:
        self._first = first_seconds
        self._limit = limit_seconds
        self._healthy = healthy_seconds
        self._next = first_seconds
        self._started_at = time.monotonic()

    def started(self) -> None:
        self._started_at = time.monotonic()

    def after_failure(self) -> float:
        """Return how many seconds to wait after the failed attempt."""
        if time.monotonic() - self._started_at >= self._healthy:
            self._next = self._first
        wait, self._next = self._next, min(2 * self._next, self._limit)
        return wait

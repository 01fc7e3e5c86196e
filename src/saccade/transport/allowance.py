"""Limits how much useless data a peer may send, such as frames without content."""

import time


class Allowance:
    """Allows *burst* at once and *per_second* more over time; at most *burst* can be saved up."""

    def __init__(self, burst: int, per_second: float) -> None:
        self._burst = burst
        self._per_second = per_second
        self._left: float = burst
        self._refilled_at = time.monotonic()

    def earn(self, amount: int) -> None:
        """Allow *amount* more, because the peer did something useful."""
        self._left = min(self._burst, self._left + amount)

    def spend(self) -> bool:
        """Spend one unit; return whether it was allowed."""
        self._left -= 1
        if self._left < 0:
            now = time.monotonic()
            self._left = min(self._burst, self._left + (now - self._refilled_at) * self._per_second)
            self._refilled_at = now
        return self._left >= 0

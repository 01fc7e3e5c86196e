"""How much a peer may send that is of no use, such as frames without content."""

import time


class Allowance:
    """*burst* at once, and *per_second* more with time, but never more than *burst* saved up."""

    def __init__(self, burst: int, per_second: float) -> None:
        self._burst = burst
        self._per_second = per_second
        self._left: float = burst
        self._refilled_at = time.monotonic()

    def earn(self, amount: int) -> None:
        """Allow *amount* more: the peer did something of use."""
        self._left = min(self._burst, self._left + amount)

    def spend(self) -> bool:
        """Count one; return whether it was allowed."""
        self._left -= 1
        if self._left < 0:
            now = time.monotonic()
            self._left = min(self._burst, self._left + (now - self._refilled_at) * self._per_second)
            self._refilled_at = now
        return self._left >= 0

"""Circuit breakers: a worker that fails again and again before the first token gets no requests for a while.

closed -> open after FAILURES failures in a row. After its wait, an open breaker lets a trial through (half-open): a
first token closes it, a failure opens it again, for twice as long. If a trial ends without either, because its client
left, another follows after the same wait.
"""

from dataclasses import dataclass
from typing import Literal

FAILURES = 3
FIRST_SECONDS = 1.0
LIMIT_SECONDS = 30.0

State = Literal["closed", "open", "half_open"]


@dataclass(frozen=True)
class BreakerReport:
    """A breaker's state. *reason* says why it is not closed, or is ""; *wait_seconds* remain until a trial."""

    state: State = "closed"
    reason: str = ""
    wait_seconds: float = 0.0


CLOSED = BreakerReport()


class _Breaker:
    """One worker's breaker. It counts failures in a row, and is open from the FAILURES-th one on."""

    def __init__(self) -> None:
        self.num_failures = 0
        self.reason = ""
        self.wait_seconds = FIRST_SECONDS
        self.trial_at = 0.0
        self.is_tried = False

    @property
    def is_open(self) -> bool:
        return self.num_failures >= FAILURES


class Breakers:
    """A breaker for each worker, by name. *now* is a monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._breakers: dict[str, _Breaker] = {}

    def allows(self, worker: str, now: float) -> bool:
        """Return whether *worker* may get a request."""
        breaker = self._breakers.get(worker)
        return breaker is None or not breaker.is_open or now >= breaker.trial_at

    def refusing(self, now: float) -> list[str]:
        """Return the workers that may get no request."""
        return [worker for worker in self._breakers if not self.allows(worker, now)] if self._breakers else []

    def on_send(self, worker: str, now: float) -> None:
        """Note that *worker* gets a request. If it is a trial, the next one waits."""
        breaker = self._breakers.get(worker)
        if breaker is not None and breaker.is_open:
            breaker.is_tried = True
            breaker.trial_at = now + breaker.wait_seconds

    def succeeded(self, worker: str) -> bool:
        """Note a first token. Return whether it closed the breaker."""
        breaker = self._breakers.pop(worker, None)
        return breaker is not None and breaker.is_open

    def failed(self, worker: str, reason: str, now: float) -> bool:
        """Note a failure before the first token. Return whether the breaker is now open."""
        breaker = self._breakers.setdefault(worker, _Breaker())
        breaker.num_failures += 1
        breaker.reason = reason
        if breaker.num_failures == FAILURES:
            breaker.trial_at = now + breaker.wait_seconds
        elif breaker.is_tried:
            # Only a trial is news: requests from before the breaker opened fail late.
            breaker.wait_seconds = min(2 * breaker.wait_seconds, LIMIT_SECONDS)
            breaker.trial_at = now + breaker.wait_seconds
            breaker.is_tried = False
        else:
            return False
        return True

    def forget(self, worker: str) -> None:
        self._breakers.pop(worker, None)

    def report(self, worker: str, now: float) -> BreakerReport:
        """Return the state of the breaker of *worker*."""
        breaker = self._breakers.get(worker)
        if breaker is None or not breaker.is_open:
            return CLOSED
        reason = f"{breaker.num_failures} requests in a row failed before their first token: {breaker.reason}"
        wait_seconds = max(0.0, breaker.trial_at - now)
        return BreakerReport("open" if wait_seconds and not breaker.is_tried else "half_open", reason, wait_seconds)

"""What workers are expected to hold, by the requests that were placed there: kept apart from what they report.

Requests that arrive together and begin alike find each other by predictions; a report of the blocks comes only when
they are computed. Of a worker that reports nothing, what was sent there is assumed to be held, for longer. Either is
gone after its time to live, whether it has come true or not.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Expectation(NamedTuple):
    """*keys* that were expected at once, until *expires_at*."""

    keys: Sequence[bytes] = ()
    expires_at: float = 0.0


class Predictions:
    """Keys of blocks and images by the worker that will hold them, each for *time_to_live_seconds*.

    Any bytes may be a key. Of one worker at most *max_keys* are kept; the oldest are dropped first. *now* is a
    monotonic clock, in seconds.
    """

    def __init__(self, time_to_live_seconds: float, max_keys: int) -> None:
        self._time_to_live = time_to_live_seconds
        self._max_keys = max_keys
        self._expiry: defaultdict[str, dict[bytes, float]] = defaultdict(dict)

    def add(self, worker: str, keys: Sequence[bytes], now: float) -> Expectation:
        """Expect *keys* at *worker* from now on; of too many, the first."""
        expiry, expires_at = self._expiry[worker], now + self._time_to_live
        expected_keys = keys[: self._max_keys]
        if not expiry.keys().isdisjoint(expected_keys):
            # A key that is expected again moves to the end, so that the keys are in order of expiry.
            for key in expected_keys:
                expiry.pop(key, None)
        expiry.update(dict.fromkeys(expected_keys, expires_at))
        while len(expiry) > self._max_keys:
            del expiry[next(iter(expiry))]
        return Expectation(expected_keys, expires_at)

    def withdraw(self, worker: str, expectation: Expectation) -> None:
        """Expect it no longer, because its request was never computed; what another has expected since stays."""
        expiry = self._expiry.get(worker, {})
        for key in expectation.keys:
            if expiry.get(key) == expectation.expires_at:
                del expiry[key]

    def expected(self, worker: str, now: float) -> Mapping[bytes, float]:
        """Return the keys expected at *worker*, each with the time of its expiry."""
        expiry = self._expiry.get(worker, {})
        while expiry and expiry[first := next(iter(expiry))] <= now:
            del expiry[first]
        return expiry

    def forget(self, worker: str) -> None:
        """Expect nothing at *worker*: its caches are gone."""
        self._expiry.pop(worker, None)

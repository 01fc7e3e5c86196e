"""What workers are expected to hold soon: the keys of blocks and images that were sent there.

Predictions bring requests together that arrive at once and begin alike: a report comes only after the blocks are
computed. A worker that reports nothing is assumed to hold the prompts sent there, for longer. Both expire after their
time to live, confirmed or not.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

PREDICTED_SECONDS = 5.0
"""The time to live of predictions at a worker that reports."""

PREDICTED_KEYS = 1 << 18
"""The most predictions for one worker."""

ASSUMED_SECONDS = 120.0
"""The time to live of assumptions about a worker that reports nothing."""

ASSUMED_KEYS = 1 << 16
"""The most for one worker: a million tokens in blocks of 16, the size of a large KV cache."""


class Expectation(NamedTuple):
    """*keys* of one call of add(), expected until *expires_at*."""

    keys: Sequence[bytes] = ()
    expires_at: float = 0.0


class Predictions:
    """Keys of blocks and images by the worker that will hold them, each for *time_to_live_seconds*.

    Any bytes may be a key. At most *max_keys* are kept for one worker; the oldest are dropped first. *now* is a
    monotonic clock, in seconds.
    """

    def __init__(self, time_to_live_seconds: float, max_keys: int) -> None:
        self._time_to_live = time_to_live_seconds
        self._max_keys = max_keys
        self._expiry: defaultdict[str, dict[bytes, float]] = defaultdict(dict)

    def add(self, worker: str, keys: Sequence[bytes], now: float) -> Expectation:
        """Expect *keys* at *worker* from now on, at most the first *max_keys*."""
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
        """Withdraw *expectation*, because its request was never computed. Keys that another request expects stay."""
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

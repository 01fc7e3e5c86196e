"""What workers will soon hold, by the requests that were just placed there: kept apart from what they report.

Requests that arrive together and begin alike find each other by predictions; a report of the blocks comes only when
they are computed. A prediction that does not come true is gone after its time to live.
"""

from collections import defaultdict
from collections.abc import Iterable

TIME_TO_LIVE_SECONDS = 5.0
MAX_KEYS = 1 << 18
"""Of one worker; the oldest are dropped first."""


class Predictions:
    """Keys of blocks and pictures by the worker that will hold them. *now* is a monotonic clock, in seconds.

    Any bytes may be a key.
    """

    def __init__(self, time_to_live_seconds: float = TIME_TO_LIVE_SECONDS, max_keys: int = MAX_KEYS) -> None:
        self._time_to_live = time_to_live_seconds
        self._max_keys = max_keys
        self._expiry: defaultdict[str, dict[bytes, float]] = defaultdict(dict)

    def add(self, worker: str, keys: Iterable[bytes], now: float) -> None:
        """Expect *keys* at *worker* from now on."""
        expiry = self._expiry[worker]
        for key in keys:
            expiry.pop(key, None)
            expiry[key] = now + self._time_to_live
        while len(expiry) > self._max_keys:
            del expiry[next(iter(expiry))]

    def retract(self, worker: str, keys: Iterable[bytes]) -> None:
        """Expect *keys* no longer: their request was never sent."""
        for key in keys:
            self._expiry[worker].pop(key, None)

    def held(self, worker: str, now: float) -> dict[bytes, float]:
        """Return what is expected at *worker*; the caller changes nothing in it."""
        expiry = self._expiry[worker]
        # The keys lie in the order in which they expire.
        while expiry and expiry[first := next(iter(expiry))] <= now:
            del expiry[first]
        return expiry

    def forget(self, worker: str) -> None:
        """Expect nothing at *worker*: its caches are gone."""
        self._expiry.pop(worker, None)

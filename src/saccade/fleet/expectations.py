"""What workers are expected to hold soon: the keys of blocks and images that were sent there.

Predictions bring together requests that arrive at once and begin alike, because a report comes only after the blocks
are computed. A worker that reports nothing is assumed to hold the prompts sent there, for longer. Both expire after
their time to live, confirmed or not.
"""

from collections import defaultdict, deque
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
    """*keys* of one call of add() for the worker at *row*, expected until *expires_at*."""

    row: int
    keys: Sequence[bytes] = ()
    expires_at: float = 0.0


class Expectations:
    """Keys of blocks and images by the worker that will hold them, each for *time_to_live_seconds*.

    A worker is a row, and the bit 1 << row of a key's mask. Any bytes may be a key. At most *max_keys* are kept for one
    worker; the oldest are dropped first. *now* is a monotonic clock, in seconds.
    """

    def __init__(self, time_to_live_seconds: float, max_keys: int) -> None:
        self._time_to_live = time_to_live_seconds
        self._max_keys = max_keys
        self._expiry: defaultdict[int, dict[bytes, float]] = defaultdict(dict)
        self._masks: dict[bytes, int] = {}
        self._added: deque[Expectation] = deque()

    def __bool__(self) -> bool:
        return bool(self._masks)

    def add(self, row: int, keys: Sequence[bytes], now: float) -> Expectation:
        """Expect *keys* at the worker at *row* from now on, at most the first *max_keys*."""
        expectation = Expectation(row, keys[: self._max_keys], now + self._time_to_live)
        expiry = self._expiry[row]
        if not expiry.keys().isdisjoint(expectation.keys):
            # A key that is expected again moves to the end, so that the keys are in order of expiry.
            for key in expectation.keys:
                expiry.pop(key, None)
        expiry.update(dict.fromkeys(expectation.keys, expectation.expires_at))
        self._mark(row, expectation.keys)
        while len(expiry) > self._max_keys:
            self._drop(row, next(iter(expiry)))
        self._added.append(expectation)
        return expectation

    def withdraw(self, expectation: Expectation) -> None:
        """Withdraw *expectation*, because its request was never computed. Keys that another request expects stay."""
        expiry = self._expiry.get(expectation.row, {})
        for key in expectation.keys:
            if expiry.get(key) == expectation.expires_at:
                self._drop(expectation.row, key)

    def expire(self, now: float) -> None:
        """Drop what is no longer expected at *now*."""
        while self._added and self._added[0].expires_at <= now:
            self.withdraw(self._added.popleft())

    def rows_of(self, key: bytes) -> int:
        """Return the workers where *key* is expected, as bits."""
        return self._masks.get(key, 0)

    def expected(self, row: int) -> Mapping[bytes, float]:
        """Return the keys expected at the worker at *row*, each with the time of its expiry."""
        return self._expiry.get(row, {})

    def forget(self, row: int) -> None:
        """Expect nothing at the worker at *row*: its caches are gone."""
        for key in list(self._expiry.get(row, ())):
            self._drop(row, key)
        self._expiry.pop(row, None)

    def _mark(self, row: int, keys: Sequence[bytes]) -> None:
        masks, bit = self._masks, 1 << row
        if masks.keys().isdisjoint(keys):
            # The common case, without a loop: a prompt of 128k tokens has 8,192 keys.
            masks.update(dict.fromkeys(keys, bit))
            return
        for key in keys:
            masks[key] = masks.get(key, 0) | bit

    def _drop(self, row: int, key: bytes) -> None:
        del self._expiry[row][key]
        mask = self._masks[key] & ~(1 << row)
        if mask:
            self._masks[key] = mask
        else:
            del self._masks[key]

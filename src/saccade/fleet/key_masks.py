"""The workers that hold a key, as the bits of a number: one pass over a prompt's keys finds every worker's overlap."""

from collections.abc import Iterable, Iterator
from itertools import repeat

SWEPT_KEYS = 2048
"""The keys that one call of sweep() examines, in about a millisecond."""


class KeyMasks:
    """A set of keys for each worker; a worker is a bit, such as 1 << 3.

    Removing millions of one worker's keys at once would block the event loop for a second. So the worker gives up its
    bit, and sweep() moves the keys to another dict, piece by piece, without such bits.
    """

    def __init__(self) -> None:
        self._masks: dict[bytes, int] = {}
        self._unswept: dict[bytes, int] = {}
        self._given_up = 0
        self._swept = 0

    def __len__(self) -> int:
        return len(self._masks) + len(self._unswept)

    @property
    def bits_in_use(self) -> int:
        """The given-up bits that a key may still have."""
        return self._given_up | self._swept

    def get(self, key: bytes) -> int:
        return self._masks.get(key, 0) | self._unswept.get(key, 0)

    def of(self, keys: Iterable[bytes]) -> Iterator[int]:
        return map(self.get, keys) if self._unswept else map(self._masks.get, keys, repeat(0))

    def add(self, key: bytes, bit: int) -> bool:
        """Add *key* for one worker; return whether it is new there."""
        mask = self._pulled(key) if self._unswept else self._masks.get(key, 0)
        if mask & bit:
            return False
        # All keys that only one worker holds share one number.
        self._masks[key] = mask | bit if mask else bit
        return True

    def discard(self, key: bytes, bit: int) -> bool:
        """Remove *key* from one worker; return whether the worker had it."""
        mask = self._pulled(key) if self._unswept else self._masks.get(key, 0)
        if not mask & bit:
            return False
        if mask == bit:
            del self._masks[key]
        else:
            self._masks[key] = mask ^ bit
        return True

    def give_up(self, bit: int) -> None:
        """Forget all keys of one worker. Its bit must not be used again while it is in bits_in_use."""
        self._given_up |= bit

    def sweep(self) -> bool:
        """Free some keys of given-up bits; return whether there is more to do."""
        if not self._unswept:
            self._swept, self._given_up = self._given_up, 0
            if not self._swept:
                return False
            self._masks, self._unswept = {}, self._masks
        unswept, live_bits = self._unswept, ~self._swept
        for _ in range(min(SWEPT_KEYS, len(unswept))):
            key, mask = unswept.popitem()
            if mask & live_bits:
                self._masks[key] = mask & live_bits
        if not unswept:
            self._unswept, self._swept = {}, 0
        return bool(unswept or self._given_up)

    def _pulled(self, key: bytes) -> int:
        """Sweep *key* now, and return the workers that hold it."""
        mask = self._unswept.pop(key, 0) & ~self._swept
        if mask:
            self._masks[key] = mask
        return self._masks.get(key, 0)

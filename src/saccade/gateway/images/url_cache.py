"""Images that were fetched before, for as long as their servers allow (RFC 9111, a private cache for each tenant)."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from saccade.byte_lru import ByteLru
from saccade.media.freshness import Reuse

ENTRY_BYTES = 2048
"""What an entry takes at most beside its image and its URLs, its validator included."""

_CHARACTER_BYTES = 4
"""Of a text that is not ASCII, at most."""


@dataclass(frozen=True)
class CachedImage:
    """An encoded image; *reuse* asks its server again once *is_fresh* no longer holds."""

    encoded: bytes
    reuse: Reuse
    is_fresh: bool


@dataclass(frozen=True, slots=True)
class _Entry:
    """What is kept; *fresh_until* in seconds of the cache's clock."""

    encoded: bytes
    reuse: Reuse
    fresh_until: float


class UrlCache:
    """(salt, URL) to encoded images, *capacity_bytes* of them; the least recently used leave first. 0 turns it off.

    *clock* gives seconds. *num_hits* could be used unasked; what had to be asked for again is among *num_misses*.
    """

    def __init__(self, capacity_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_hits = 0
        self.num_misses = 0
        self._clock = clock
        self._entries = ByteLru[tuple[bytes, str], _Entry](capacity_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of all entries."""
        return self._entries.num_bytes

    def get(self, salt: bytes, url: str) -> CachedImage | None:
        """Return what is kept of *url* for the tenant of *salt*."""
        entry = self._entries.get((salt, url))
        is_fresh = entry is not None and self._clock() < entry.fresh_until
        self.num_hits += is_fresh
        self.num_misses += not is_fresh
        if entry is None:
            return None
        return CachedImage(entry.encoded, entry.reuse, is_fresh)

    def put(self, salt: bytes, url: str, encoded: bytes, reuse: Reuse) -> None:
        """Keep *encoded*, which has just arrived, where *reuse* allows; in any case forget what was kept before."""
        key = (salt, url)
        self._entries.pop(key)
        is_elsewhere = reuse.url != url
        num_bytes = len(encoded) + _num_bytes(url) + is_elsewhere * _num_bytes(reuse.url) + ENTRY_BYTES
        if not reuse.is_storable or num_bytes > self._entries.budget_bytes:
            return
        kept = reuse if is_elsewhere else replace(reuse, url=url)  # one copy of the URL is counted, so one is held
        self._entries.put(key, _Entry(encoded, kept, self._clock() + reuse.fresh_seconds), num_bytes)

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()


def _num_bytes(text: str) -> int:
    return len(text) * (1 if text.isascii() else _CHARACTER_BYTES)

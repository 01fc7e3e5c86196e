"""Caches fetched images by URL for as long as their servers allow (RFC 9111, a private cache for each tenant)."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from saccade.byte_lru import ByteLru
from saccade.media.freshness import Reuse

ENTRY_BYTES = 2048
"""Memory of an entry besides its image and its URLs, at most; includes its validator."""

_CHARACTER_BYTES = 4
"""Bytes of a character in a text that is not ASCII, at most."""


@dataclass(frozen=True)
class CachedImage:
    """An encoded image; when it is no longer fresh, *reuse* revalidates it with its server."""

    encoded: bytes
    reuse: Reuse
    is_fresh: bool


@dataclass(frozen=True, slots=True)
class _Entry:
    """A cache entry; *fresh_until* is in seconds of the cache's clock."""

    encoded: bytes
    reuse: Reuse
    fresh_until: float


class UrlCache:
    """An LRU cache of encoded images, keyed by (salt, URL).

    - capacity_bytes: the most that all entries may take; 0 turns the cache off.
    - clock: returns seconds.
    - num_hits: how often a fresh image was found.
    - num_misses: how often there was no image, or one to revalidate.
    """

    def __init__(self, capacity_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_hits = 0
        self.num_misses = 0
        self._clock = clock
        self._entries = ByteLru[tuple[bytes, str], _Entry](capacity_bytes)

    @property
    def num_bytes(self) -> int:
        """Size of all entries, in bytes."""
        return self._entries.num_bytes

    def get(self, salt: bytes, url: str) -> CachedImage | None:
        """Return the cached image at *url* for the tenant with *salt*, or None if there is none."""
        entry = self._entries.get((salt, url))
        is_fresh = entry is not None and self._clock() < entry.fresh_until
        self.num_hits += is_fresh
        self.num_misses += not is_fresh
        if entry is None:
            return None
        return CachedImage(entry.encoded, entry.reuse, is_fresh)

    def put(self, salt: bytes, url: str, encoded: bytes, reuse: Reuse) -> None:
        """Store *encoded*, which has just arrived, for *url*; if *reuse* forbids storing, drop the old entry."""
        key = (salt, url)
        self._entries.pop(key)
        is_elsewhere = reuse.url != url
        num_bytes = len(encoded) + _num_bytes(url) + is_elsewhere * _num_bytes(reuse.url) + ENTRY_BYTES
        if not reuse.is_storable or num_bytes > self._entries.budget_bytes:
            return
        entry_reuse = reuse if is_elsewhere else replace(reuse, url=url)  # only one copy of the URL is counted
        self._entries.put(key, _Entry(encoded, entry_reuse, self._clock() + reuse.fresh_seconds), num_bytes)

    def clear(self) -> None:
        """Drop all entries."""
        self._entries.clear()


def _num_bytes(text: str) -> int:
    return len(text) * (1 if text.isascii() else _CHARACTER_BYTES)

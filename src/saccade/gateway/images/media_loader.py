"""From an image's URL to its encoded bytes: a data: URL, a fetch, or a cached fetch.

Fetched images are kept for as long as their servers allow (RFC 9111, a private cache for each tenant).
"""

import binascii
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import pybase64

from saccade.byte_lru import ByteLru
from saccade.errors import InvalidBase64, InvalidImageUrl
from saccade.gateway.concurrency import SingleFlight
from saccade.gateway.limits import Reservation
from saccade.gateway.request import Request
from saccade.media.fetch import Fetcher
from saccade.media.freshness import Reuse
from saccade.telemetry import Metrics

ENTRY_BYTES = 2048
"""Memory of an entry besides its image and its URLs, at most; includes its validator."""

_CHARACTER_BYTES = 4
"""Bytes of a character in a text that is not ASCII, at most."""


@dataclass(frozen=True)
class CachedImage:
    """An encoded image; once it is no longer fresh, *reuse* revalidates it with its server."""

    encoded: bytes
    reuse: Reuse
    is_fresh: bool


@dataclass(frozen=True, slots=True)
class _Entry:
    """A cache entry; *fresh_until* in seconds of the cache's clock."""

    encoded: bytes
    reuse: Reuse
    fresh_until: float


class UrlCache:
    """Encoded images by (salt, URL): an LRU cache of *capacity_bytes*; 0 turns it off.

    *clock* returns seconds. *num_hits* counts fresh images; stale ones that need revalidation count as *num_misses*.
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
        """Return the cached image of *url* for the tenant of *salt*."""
        entry = self._entries.get((salt, url))
        is_fresh = entry is not None and self._clock() < entry.fresh_until
        self.num_hits += is_fresh
        self.num_misses += not is_fresh
        if entry is None:
            return None
        return CachedImage(entry.encoded, entry.reuse, is_fresh)

    def put(self, salt: bytes, url: str, encoded: bytes, reuse: Reuse) -> None:
        """Replace the entry of *url* by *encoded*, which has just arrived, or drop it if *reuse* forbids storing."""
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


class MediaLoader:
    """Fetches images; simultaneous requests of one tenant for the same URL share one fetch."""

    def __init__(self, fetcher: Fetcher, url_cache: UrlCache, metrics: Metrics) -> None:
        self._fetcher = fetcher
        self._cache = url_cache
        self._metrics = metrics
        self._flights = SingleFlight[tuple[bytes, str], bytes]()

    async def fetch(self, request: Request, url: str, salt: bytes) -> bytes:
        """Return the encoded image at *url*, for the tenant of *salt*; *request* counts it.

        Raises InvalidImageUrl, ImageTooLarge and QueueFull.
        """
        encoded = await self._flights.join((salt, url), lambda: self._fetch(salt, url, request.reservation()))
        request.memory.take(len(encoded))
        return encoded

    async def _fetch(self, salt: bytes, url: str, reservation: Reservation) -> bytes:
        cached = self._cache.get(salt, url)
        if cached is not None and cached.is_fresh:
            return cached.encoded
        # A shared fetch has its own reservation: the request that started it may end before the others.
        with self._metrics.stage("fetch"), reservation as memory:
            reuse = cached.reuse if cached is not None else None
            fetched = await self._fetcher.fetch(url, reuse, client=memory.client, hold=memory.grow)
        encoded = cached.encoded if cached is not None and fetched.not_modified else fetched.encoded
        self._cache.put(salt, url, encoded, fetched.reuse)
        return encoded


def is_data_url(url: str) -> bool:
    """Whether *url* contains the image itself."""
    return url[:5].lower() == "data:"


def decode_data_url(url: str) -> bytes:
    """Return the bytes of a data: URL. Raises InvalidImageUrl and InvalidBase64."""
    head, comma, payload = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidImageUrl(
            "A data: URL must be `data:image/png;base64,`, or another media type, followed by the file in base64."
        )
    return decode_base64(payload)


def decode_base64(payload: str) -> bytes:
    """Return the bytes of a data: URL's *payload*. Raises InvalidBase64."""
    try:
        return pybase64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidBase64("The data: URL's payload is not valid base64.") from error

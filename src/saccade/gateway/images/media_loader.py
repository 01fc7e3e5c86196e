"""Loads the bytes of an image or video from a data: URL or a web address."""

from saccade.errors import (
    InvalidImageUrl,
)
from saccade.gateway.images.base64_text import decode_base64
from saccade.gateway.images.url_cache import UrlCache
from saccade.gateway.request import Request
from saccade.gateway.reservation import Reservation
from saccade.gateway.single_flight import SingleFlight
from saccade.media.fetch import Fetcher
from saccade.telemetry import Metrics


class MediaLoader:
    """Fetches images; a tenant's simultaneous requests for one URL share a fetch."""

    def __init__(self, fetcher: Fetcher, url_cache: UrlCache, metrics: Metrics) -> None:
        self._fetcher = fetcher
        self._cache = url_cache
        self._metrics = metrics
        self._flights = SingleFlight[tuple[bytes, str], bytes]()

    async def fetch(self, request: Request, url: str, salt: bytes) -> bytes:
        """Return the encoded image at *url* for the tenant with *salt*, and count its bytes in *request*.

        Raises InvalidImageUrl, ImageTooLarge and QueueFull.
        """
        encoded = await self._flights.join((salt, url), self._fetch, salt, url, request.reservation())
        request.memory.take_bytes(len(encoded))
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
    """Return whether *url* contains the image itself."""
    return url[:5].lower() == "data:"


def decode_data_url(url: str) -> bytes:
    """Return the bytes of a data: URL. Raises InvalidImageUrl and InvalidBase64."""
    head, comma, payload = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidImageUrl(
            "A data: URL must be `data:image/png;base64,`, or another media type, followed by the file in base64."
        )
    return decode_base64(payload)

"""An image's URL to its encoded bytes: in the request itself, fetched, or fetched before."""

import binascii

import pybase64

from saccade.errors import InvalidBase64, InvalidImageUrl
from saccade.gateway.images.url_cache import UrlCache
from saccade.gateway.limits.byte_budget import Reservation
from saccade.gateway.limits.single_flight import SingleFlight
from saccade.gateway.request import Request
from saccade.media.fetch import Fetcher
from saccade.telemetry import Metrics


class MediaLoader:
    """Fetches images for one gateway; requests of one tenant for the same URL at the same time share one fetch."""

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
        kept = self._cache.get(salt, url)
        if kept is not None and kept.is_fresh:
            return kept.encoded
        # A shared fetch has a reservation of its own: the request that started the fetch may leave before the others.
        with self._metrics.stage("fetch"), reservation as memory:
            reuse = kept.reuse if kept is not None else None
            fetched = await self._fetcher.fetch(url, reuse, client=memory.client, hold=memory.grow)
        encoded = kept.encoded if kept is not None and fetched.not_modified else fetched.encoded
        self._cache.put(salt, url, encoded, fetched.reuse)
        return encoded


def is_data_url(url: str) -> bool:
    """Whether *url* holds the image itself."""
    return url[:5].lower() == "data:"


def decode_data_url(url: str) -> bytes:
    """Return the bytes of a data: URL. Raises InvalidImageUrl and InvalidBase64."""
    head, comma, payload = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidImageUrl(
            "A data: URL must be `data:image/png;base64,`, or another media type, followed by the file in base64."
        )
    try:
        return pybase64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidBase64("The data: URL's payload is not valid base64.") from error

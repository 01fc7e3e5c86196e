"""A picture's URL to its encoded bytes: in the request itself, fetched, or fetched before."""

import asyncio
import binascii
from collections.abc import Iterable

import pybase64
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from saccade.errors import InvalidBase64, InvalidImageUrl
from saccade.gateway.single_flight import SingleFlight
from saccade.gateway.url_cache import UrlCache
from saccade.media.fetch import Fetcher
from saccade.telemetry import Metrics

THREAD_FROM_CHARACTERS = 1 << 20
"""A longer data: URL is decoded in a thread; a shorter one takes less time than a thread would hold it up."""


class Sources:
    """Reads pictures for one gateway: one that is asked for twice at a time, by one tenant, is fetched once."""

    def __init__(self, fetcher: Fetcher, url_cache: UrlCache, metrics: Metrics) -> None:
        self._fetcher = fetcher
        self._cache = url_cache
        self._metrics = metrics
        self._flights = SingleFlight[tuple[bytes, str], bytes]()
        metrics.registry.register(FetchCollector(fetcher))

    async def read(self, url: str, salt: bytes) -> bytes:
        """Return the encoded picture at *url*, for the tenant of *salt*.

        Raises InvalidImageUrl, InvalidBase64, ImageTooLarge and QueueFull.
        """
        if url[:5].lower() == "data:":
            is_long = len(url) > THREAD_FROM_CHARACTERS
            return await asyncio.to_thread(decode_data_url, url) if is_long else decode_data_url(url)
        return await self._flights.join((salt, url), lambda: self._fetch(salt, url))

    async def _fetch(self, salt: bytes, url: str) -> bytes:
        kept = self._cache.get(salt, url)
        if kept is not None and kept.is_fresh:
            return kept.encoded
        with self._metrics.stage("fetch"):
            fetched = await self._fetcher.fetch(url, kept.reuse if kept is not None else None, tenant=salt)
        encoded = kept.encoded if kept is not None and fetched.not_modified else fetched.encoded
        self._cache.put(salt, url, encoded, fetched.reuse)
        return encoded


class FetchCollector(Collector):
    """What a fetcher counts, as metrics."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher

    def collect(self) -> Iterable[Metric]:
        """Yield every metric."""
        fetches = CounterMetricFamily("saccade_fetches", "Pictures asked for by URL, by outcome.", labels=("outcome",))
        for outcome, count in self._fetcher.outcomes.items():
            fetches.add_metric((outcome,), count)
        yield fetches
        counters = (
            ("saccade_fetch_bytes", "Bytes of pictures that were fetched.", self._fetcher.num_bytes),
            ("saccade_fetch_refused_connections", "Not made: forbidden address.", self._fetcher.guard.num_refused),
        )
        for name, words, value in counters:
            yield CounterMetricFamily(name, words, value=value)


def decode_data_url(url: str) -> bytes:
    """Return the bytes of a data: URL. Raises InvalidImageUrl and InvalidBase64."""
    head, comma, payload = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidImageUrl("A data: URL must be `data:image/png;base64,` followed by the image in base64.")
    try:
        return pybase64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidBase64("The data: URL's payload is not valid base64.") from error

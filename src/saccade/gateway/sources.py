"""A picture's URL to its encoded bytes: in the request itself, fetched, or fetched before."""

import asyncio
import binascii
from collections.abc import Iterable
from dataclasses import dataclass

import pybase64
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from saccade.errors import InvalidBase64, InvalidImageUrl
from saccade.gateway.url_cache import UrlCache
from saccade.media.fetch import Fetcher
from saccade.telemetry import Metrics

THREAD_FROM_CHARACTERS = 1 << 20
"""A longer data: URL is decoded in a thread; a shorter one takes less time than a thread would hold it up."""


@dataclass
class _Flight:
    """A fetch under way, and how many wait for it."""

    task: asyncio.Task[bytes]
    num_waiting: int = 0


class Sources:
    """Reads pictures for one gateway: one that is asked for twice at a time, by one tenant, is fetched once."""

    def __init__(self, fetcher: Fetcher, url_cache: UrlCache, metrics: Metrics) -> None:
        self._fetcher = fetcher
        self._cache = url_cache
        self._metrics = metrics
        self._flights: dict[tuple[bytes, str], _Flight] = {}
        metrics.registry.register(FetchCollector(fetcher))

    async def read(self, url: str, salt: bytes) -> bytes:
        """Return the encoded picture at *url*, for the tenant of *salt*.

        Raises InvalidImageUrl, InvalidBase64, ImageTooLarge and QueueFull.
        """
        if url[:5].lower() == "data:":
            is_long = len(url) > THREAD_FROM_CHARACTERS
            return await asyncio.to_thread(decode_data_url, url) if is_long else decode_data_url(url)
        return await self._join(salt, url)

    async def _join(self, salt: bytes, url: str) -> bytes:
        """Wait for the fetch of *url*; it goes on while anybody does."""
        key = (salt, url)
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.create_task(self._fetch(salt, url), name="fetch"))
            flight.task.add_done_callback(lambda task: self._land(key, task))
        flight.num_waiting += 1
        try:
            await asyncio.wait((flight.task,))
        finally:
            flight.num_waiting -= 1
            if not flight.num_waiting and not flight.task.done():
                flight.task.cancel()
                self._forget(key, flight.task)
        return flight.task.result()

    def _land(self, key: tuple[bytes, str], task: asyncio.Task[bytes]) -> None:
        self._forget(key, task)
        if not task.cancelled():
            task.exception()  # read here, because nobody may be left who waits for it

    def _forget(self, key: tuple[bytes, str], task: asyncio.Task[bytes]) -> None:
        """Let the next one fetch anew, unless somebody does already."""
        flight = self._flights.get(key)
        if flight is not None and flight.task is task:
            del self._flights[key]

    async def _fetch(self, salt: bytes, url: str) -> bytes:
        kept = self._cache.get(salt, url)
        if kept is not None and kept.is_fresh:
            return kept.encoded
        with self._metrics.stage("fetch"):
            fetched = await self._fetcher.fetch(url, kept.reuse if kept is not None else None)
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

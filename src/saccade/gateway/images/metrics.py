"""What fetching counts, what a cache holds and how often it helped, read when the metrics are."""

from collections.abc import Iterable
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from saccade.media.fetch import Fetcher


class Cache(Protocol):
    """What every cache counts."""

    num_hits: int
    num_misses: int

    @property
    def num_bytes(self) -> int:
        """Bytes that are kept."""


class CacheCollector(Collector):
    """The numbers of *cache* as `saccade_<name>_cache_*`."""

    def __init__(self, name: str, cache: Cache) -> None:
        self._name = f"saccade_{name}_cache"
        self._cache = cache

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(f"{self._name}_hits", "Found, or on the way.", value=self._cache.num_hits)
        yield CounterMetricFamily(f"{self._name}_misses", "Not found.", value=self._cache.num_misses)
        yield GaugeMetricFamily(f"{self._name}_bytes", "Bytes that are kept.", value=self._cache.num_bytes)


class FetchCollector(Collector):
    """What a fetcher counts, as metrics."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher

    def collect(self) -> Iterable[Metric]:
        fetches = CounterMetricFamily("saccade_fetches", "Images asked for by URL, by outcome.", labels=("outcome",))
        for outcome, count in self._fetcher.outcomes.items():
            fetches.add_metric((outcome,), count)
        yield fetches
        counters = (
            ("saccade_fetch_bytes", "Bytes of images that were fetched.", self._fetcher.num_bytes),
            ("saccade_fetch_refused_connections", "Not made: forbidden address.", self._fetcher.guard.num_refused),
        )
        for name, words, value in counters:
            yield CounterMetricFamily(name, words, value=value)

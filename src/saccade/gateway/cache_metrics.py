"""What a cache of the gateway holds and how often it helped, read when the metrics are."""

from collections.abc import Iterable
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class Cache(Protocol):
    """What every cache counts."""

    num_hits: int
    num_misses: int
    num_bytes: int


class CacheCollector(Collector):
    """The numbers of *cache* as `saccade_<name>_cache_*`."""

    def __init__(self, name: str, cache: Cache) -> None:
        self._name = f"saccade_{name}_cache"
        self._cache = cache

    def collect(self) -> Iterable[Metric]:
        """Yield hits, misses and bytes."""
        yield CounterMetricFamily(f"{self._name}_hits", "Found, or on the way.", value=self._cache.num_hits)
        yield CounterMetricFamily(f"{self._name}_misses", "Not found.", value=self._cache.num_misses)
        yield GaugeMetricFamily(f"{self._name}_bytes", "Bytes that are kept.", value=self._cache.num_bytes)

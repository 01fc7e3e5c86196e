"""Measures the parts of a gateway's memory that clients can fill: the size of each, and its bound."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from saccade.metric_registry import filled


@dataclass(frozen=True)
class MemoryPart:
    """One part, bounded by *bound_bytes*; *num_bytes* returns its current size."""

    name: str
    bound_bytes: int
    num_bytes: Callable[[], int]


class MemoryParts(Collector):
    """Collects metrics for each part of the memory that clients can fill. docs/security.md explains the parts."""

    def __init__(self) -> None:
        self._parts: list[MemoryPart] = []

    @property
    def names(self) -> list[str]:
        """The names of all parts."""
        return [part.name for part in self._parts]

    def add_parts(self, *parts: MemoryPart) -> None:
        """Add *parts*."""
        self._parts += parts

    def collect(self) -> Iterable[Metric]:
        """Yield each part's size and bound in bytes."""
        used = GaugeMetricFamily("saccade_memory_bytes", "Bytes that a part of the memory has.", labels=("part",))
        bound = GaugeMetricFamily("saccade_memory_bound_bytes", "Bytes that a part may have.", labels=("part",))
        yield filled(used, [((part.name,), part.num_bytes()) for part in self._parts])
        yield filled(bound, [((part.name,), part.bound_bytes) for part in self._parts])

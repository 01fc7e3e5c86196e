"""A metrics registry in which a faulty collector loses only its own rows, not the whole page."""

import logging
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

logger = logging.getLogger(__name__)


def filled(family: GaugeMetricFamily | CounterMetricFamily, samples: Iterable[tuple[Sequence[str], float]]) -> Metric:
    """Add *samples* to *family* and return it. A sample is a pair: its labels' values, and its own value."""
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


class MetricRegistry(CollectorRegistry):
    """Leaves out the metrics of a collector that raises, and calls *on_failure* with its class name each time.

    Only the first failure of each class is logged, with its traceback.
    """

    def __init__(self, on_failure: Callable[[str], None]) -> None:
        super().__init__()
        self._on_failure = on_failure
        self._sources: list[Collector] = []
        self._logged: set[str] = set()

    def register(self, collector: Collector) -> None:
        """Add a collector. Raises ValueError if one of its metrics already exists."""
        super().register(collector)
        self._sources.append(collector)

    def unregister(self, collector: Collector) -> None:
        """Remove a collector. Raises KeyError for an unknown one."""
        super().unregister(collector)
        self._sources.remove(collector)

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics of every collector that does not raise."""
        for source in tuple(self._sources):
            yield from self._metrics_of(source)

    def _metrics_of(self, source: Collector) -> list[Metric]:
        try:
            return list(source.collect())
        except Exception:  # The page exists for finding faults.
            name = type(source).__name__
            self._on_failure(name)
            if name not in self._logged:
                self._logged.add(name)
                logger.exception("metrics of %s are missing from /metrics, because reading them failed", name)
            return []

"""A collector that raises loses its own rows, and is named."""

import logging
from collections.abc import Iterable

import pytest
from prometheus_client import Counter, Gauge, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from saccade.metric_registry import MetricRegistry


class Faulty(Collector):
    """Shows one metric, then raises."""

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("half", "Shown before the fault.", value=1)
        raise ValueError


def _raises() -> float:
    raise ZeroDivisionError


def test_a_faulty_collector_costs_its_own_rows(caplog: pytest.LogCaptureFixture) -> None:
    failures: list[str] = []
    registry = MetricRegistry(failures.append)
    Counter("before", "Sound.", registry=registry)
    registry.register(Faulty())
    faulty = Gauge("faulty", "Read by a function that raises.", registry=registry)
    faulty.set_function(_raises)
    Counter("behind", "Sound.", registry=registry)
    caplog.set_level(logging.ERROR)
    for _ in range(2):
        page = generate_latest(registry).decode()
        assert "before_total 0.0" in page
        assert "behind_total 0.0" in page
        assert "half" not in page
        assert "faulty" not in page
    assert failures == ["Faulty", "Gauge"] * 2
    assert caplog.text.count("metrics of Faulty are missing") == 1
    registry.unregister(faulty)
    assert generate_latest(registry)
    assert failures == [*["Faulty", "Gauge"] * 2, "Faulty"]

"""Metrics of several processes on one page: every sample has the label `gateway_process`, and none is summed.

A process that does not answer is missing from the page. Sums would then fall and rise again, which Prometheus would
treat as a restart; series that pause do not.
"""

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from saccade.protocol.gateway_calls import Family

LABEL = "gateway_process"


def families(registry: CollectorRegistry) -> list[Family]:
    """Return all metrics of *registry* as values."""
    return [
        Family(
            metric.name,
            metric.documentation,
            metric.type,
            [(sample.name, dict(sample.labels), float(sample.value)) for sample in metric.samples],
        )
        for metric in registry.collect()
    ]


class _Together(Collector):
    """The families of several processes, by the process's name, and the metrics of *shared* without that label."""

    def __init__(self, by_process: Mapping[str, Sequence[Family]], shared: CollectorRegistry) -> None:
        self._by_process = by_process
        self._shared = shared

    def collect(self) -> Iterable[Metric]:
        merged: dict[str, Metric] = {}
        for process, own in self._by_process.items():
            for family in own:
                metric = merged.setdefault(family.name, Metric(family.name, family.documentation, family.kind))
                for name, labels, value in family.samples:
                    metric.add_sample(name, {**labels, LABEL: process}, value)
        yield from merged.values()
        yield from self._shared.collect()


def render(by_process: Mapping[str, Sequence[Family]], shared: CollectorRegistry) -> bytes:
    """Return one page in Prometheus' text format. *shared* has the metrics that are the same in all processes."""
    registry = CollectorRegistry()
    registry.register(_Together(by_process, shared))
    return generate_latest(registry)

"""What the router knows of each worker, as metrics."""

import time
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from saccade.gateway.workers.cache_listener import FULL, CacheView
from saccade.gateway.workers.discovery import Discovery
from saccade.gateway.workers.dispatch import Dispatcher
from saccade.gateway.workers.pool import WorkerPool
from saccade.gateway.workers.worker_report import exactness


class SourceCollector(Collector):
    """Whether what each source of workers says now is used; nothing without such sources."""

    def __init__(self, members: Discovery) -> None:
        self._members = members

    def collect(self) -> Iterable[Metric]:
        current = GaugeMetricFamily(
            "saccade_worker_source_current",
            "Whether what the source of workers says now is used; if not, its last workers stay.",
            labels=("source",),
        )
        for source in self._members.sources:
            current.add_metric((source.name,), float(not source.fault))
        return [current] if self._members.sources else []


class RoutingCollector(Collector):
    """Turns what the router knows of each worker into samples whenever the metrics are read."""

    def __init__(self, fleet: WorkerPool, listener: CacheView) -> None:
        self._fleet = fleet
        self._listener = listener

    def collect(self) -> Iterable[Metric]:
        router = self._listener.router
        exact = GaugeMetricFamily(
            "saccade_router_exact", "Whether all that the worker holds is known.", labels=("worker", "reason")
        )
        blocks = GaugeMetricFamily(
            "saccade_router_indexed_blocks", "KV blocks that the worker is known to hold.", labels=("worker",)
        )
        requests = GaugeMetricFamily(
            "saccade_router_booked_requests", "Requests that are at the worker.", labels=("worker",)
        )
        prefill = GaugeMetricFamily(
            "saccade_router_booked_prefill_tokens",
            "Tokens that the worker has to compute before its requests have their first token.",
            labels=("worker",),
        )
        events = CounterMetricFamily("saccade_router_events", "Cache events of the worker.", labels=("worker",))
        snapshots = CounterMetricFamily(
            "saccade_router_snapshots", "Whole snapshots of the worker's caches.", labels=("worker",)
        )
        orphans = CounterMetricFamily(
            "saccade_router_orphans",
            "Reported blocks that were dropped: their parents are not held.",
            labels=("worker",),
        )
        lost = CounterMetricFamily(
            "saccade_router_lost_feeds", "Feeds of cache events that had a gap or ended.", labels=("worker",)
        )
        closed = GaugeMetricFamily(
            "saccade_router_breaker_closed",
            "1 while the worker gets requests, 0 while it gets trials only because requests to it failed.",
            labels=("worker",),
        )
        now = time.monotonic()
        for worker in self._fleet.clients:
            feed = self._listener.feed(worker)
            known = exactness(worker, self._listener)
            exact.add_metric((worker.url, known.reason), float(known.level == "EXACT"))
            blocks.add_metric((worker.url,), self._listener.num_blocks(worker.url))
            requests.add_metric((worker.url,), router.work[worker.url].num_requests)
            prefill.add_metric((worker.url,), router.work[worker.url].prefill_tokens)
            events.add_metric((worker.url,), feed.num_events)
            snapshots.add_metric((worker.url,), feed.num_snapshots)
            orphans.add_metric((worker.url,), feed.num_orphans)
            lost.add_metric((worker.url,), feed.num_lost)
            closed.add_metric((worker.url,), float(router.breakers.report(worker.url, now).state == "closed"))
        left_out = GaugeMetricFamily(
            "saccade_router_unindexed_workers",
            "Workers whose caches are not known because the index has no room: see --routing-index-bytes.",
        )
        no_room = [one for one in self._fleet.clients if self._listener.feed(one).reason.startswith(FULL)]
        left_out.add_metric((), len(no_room))
        left_out_blocks = GaugeMetricFamily(
            "saccade_router_unindexed_blocks", "KV blocks that the caches of these workers have."
        )
        left_out_blocks.add_metric((), sum(one.description.num_blocks for one in no_room if one.description))
        index = GaugeMetricFamily("saccade_router_index_bytes", "Estimated memory of the router's index.")
        index.add_metric((), self._listener.index_bytes)
        yield from (
            exact,
            blocks,
            requests,
            prefill,
            events,
            snapshots,
            orphans,
            lost,
            closed,
            left_out,
            left_out_blocks,
            index,
        )


class DispatchCollector(Collector):
    """Turns what the dispatcher counts into samples whenever the metrics are read."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def collect(self) -> Iterable[Metric]:
        waiting = GaugeMetricFamily(
            "saccade_router_queue_pending_requests", "Requests that wait because every worker has all it may have."
        )
        waiting.add_metric((), self._dispatcher.queue.num_waiting)
        retried = CounterMetricFamily(
            "saccade_router_retried_requests",
            "Requests that were sent to another worker, because the first failed before the first token.",
            labels=("model_name",),
        )
        for model, count in self._dispatcher.num_retried.items():
            retried.add_metric((model,), count)
        yield from (waiting, retried)

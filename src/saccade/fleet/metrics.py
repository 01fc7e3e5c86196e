"""Metrics of workers, collected whenever /metrics is read."""

import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from saccade.fleet.dispatch import Dispatcher
from saccade.fleet.feed import FULL
from saccade.fleet.pool import WorkerPool
from saccade.fleet.shared import CacheView, exactness
from saccade.fleet.sources import Discovery
from saccade.fleet.worker import Worker
from saccade.metric_registry import filled
from saccade.protocol.engine_load import STEP_TOKEN_BOUNDS, Load, engine_metrics

Kind = type[GaugeMetricFamily] | type[CounterMetricFamily]
GAUGE, COUNTER = GaugeMetricFamily, CounterMetricFamily

OF_WORKERS: tuple[tuple[Kind, str, str, Callable[[CacheView, Worker], float]], ...] = (
    (
        GAUGE, "saccade_router_indexed_blocks", "KV blocks that the worker is known to hold.",
        lambda view, worker: view.feed(worker).num_blocks,
    ),
    (
        GAUGE, "saccade_router_booked_requests", "Requests that are at the worker.",
        lambda view, worker: view.router.work_of(worker.url).num_requests,
    ),
    (
        GAUGE, "saccade_router_booked_prefill_tokens",
        "Tokens that the worker has to compute before its requests have their first token.",
        lambda view, worker: view.router.work_of(worker.url).prefill_tokens,
    ),
    (
        COUNTER, "saccade_router_events", "Cache events of the worker.",
        lambda view, worker: view.feed(worker).num_events,
    ),
    (
        COUNTER, "saccade_router_snapshots", "Whole snapshots of the worker's caches.",
        lambda view, worker: view.feed(worker).num_snapshots,
    ),
    (
        COUNTER, "saccade_router_orphans", "Reported blocks that were dropped: their parents are not held.",
        lambda view, worker: view.feed(worker).num_orphans,
    ),
    (
        COUNTER, "saccade_router_lost_feeds", "Feeds of cache events that had a gap or ended.",
        lambda view, worker: view.feed(worker).num_lost,
    ),
    (
        GAUGE, "saccade_router_breaker_closed",
        "1 while the worker gets requests, 0 while it gets trials only because requests to it failed.",
        lambda view, worker: view.router.breakers.report(worker.url, time.monotonic()).state == "closed",
    ),
)  # fmt: skip
KINDS: Mapping[str, Kind] = MappingProxyType({"gauge": GAUGE, "counter": COUNTER})
OF_ENGINES = tuple(engine_metrics())
LABELS = ("model_name", "worker")
CACHE_LABELS = ("block_size", "cache_dtype", "enable_prefix_caching", "gpu_memory_utilization", "num_gpu_blocks")
"""The labels of a KV cache; the names are vLLM's, on a CPU too."""

STEP_STAGES = ("schedule", "batch", "encode", "network", "postprocess")
"""Parts of a step's wall time; encode is the vision part of network."""

STATELESS = ("between_states", "evicted_state", "evicted_window")
"""Why prompt tokens in cached blocks are computed again."""


class RoutingCollector(Collector):
    """Metrics of what the router knows about each worker."""

    def __init__(self, worker_pool: WorkerPool, cache_view: CacheView) -> None:
        self._worker_pool = worker_pool
        self._cache_view = cache_view

    def collect(self) -> Iterable[Metric]:
        workers, view = self._worker_pool.clients, self._cache_view
        exact = GAUGE(
            "saccade_router_exact", "Whether all that the worker holds is known.", labels=("worker", "reason")
        )
        known = [(worker.url, exactness(worker, view)) for worker in workers]
        yield filled(exact, [((url, one.reason), float(one.level == "EXACT")) for url, one in known])
        for kind, name, words, read in OF_WORKERS:
            yield filled(
                kind(name, words, labels=("worker",)), [((one.url,), float(read(view, one))) for one in workers]
            )
        no_room = [one for one in workers if view.feed(one).reason.startswith(FULL)]
        yield GAUGE(
            "saccade_router_unindexed_workers",
            "Workers whose caches are not known because the index has no room: see --routing-index-bytes.",
            value=len(no_room),
        )
        yield GAUGE(
            "saccade_router_unindexed_blocks",
            "KV blocks that the caches of these workers have.",
            value=sum(one.state.description.num_blocks for one in no_room if one.state.description),
        )
        yield GAUGE("saccade_router_index_bytes", "Estimated memory of the router's index.", value=view.index_bytes)


class DispatchCollector(Collector):
    """Metrics of the dispatcher's counts."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def collect(self) -> Iterable[Metric]:
        yield GAUGE(
            "saccade_router_queue_pending_requests",
            "Requests that wait because every worker has all it may have.",
            value=self._dispatcher.num_waiting,
        )
        placed = COUNTER("saccade_router_requests", "Requests that were placed at the worker.", labels=("worker",))
        yield filled(placed, [((worker,), count) for worker, count in self._dispatcher.num_placed.items()])
        retried = COUNTER(
            "saccade_router_retried_requests",
            "Requests that were sent to another worker, because the first failed before the first token.",
            labels=("model_name",),
        )
        yield filled(retried, [((model,), count) for model, count in self._dispatcher.num_retried.items()])


class SourceCollector(Collector):
    """A metric that says for each source of workers whether its current content is used; none without sources."""

    def __init__(self, discovery: Discovery) -> None:
        self._discovery = discovery

    def collect(self) -> Iterable[Metric]:
        current = GAUGE(
            "saccade_worker_source_current",
            "Whether what the source of workers says now is used; if not, its last workers stay.",
            labels=("source",),
        )
        sources = self._discovery.sources
        yield from [filled(current, [((one.name,), float(not one.fault)) for one in sources])] if sources else []


class FleetCollector(Collector):
    """Metrics from the last Load of every worker; a worker that is away counts as idle."""

    def __init__(self, worker_pool: WorkerPool) -> None:
        self._worker_pool = worker_pool

    def collect(self) -> Iterable[Metric]:
        clients = self._worker_pool.clients
        described = [(client, client.state.description) for client in clients if client.state.description is not None]
        loads = [((description.model, client.url), client.state.load or Load()) for client, description in described]
        for (kind, name, words), field in OF_ENGINES:
            family = KINDS[kind](name, words, labels=LABELS)
            yield filled(family, [(labels, getattr(load, field)) for labels, load in loads])
        seconds = COUNTER("saccade_step_seconds", "Wall time of steps by stage.", labels=(*LABELS, "stage"))
        stages = itertools.product(loads, STEP_STAGES)
        yield filled(seconds, [((*of, stage), getattr(load, f"{stage}_seconds_total")) for (of, load), stage in stages])
        stateless = COUNTER(
            "saccade_prefix_cache_stateless_tokens",
            "Prompt tokens in cached blocks, computed again because no recurrent state, or no window, is after them.",
            labels=(*LABELS, "cause"),
        )
        causes = itertools.product(loads, STATELESS)
        yield filled(
            stateless, [((*of, cause), getattr(load, f"{cause}_tokens_total")) for (of, load), cause in causes]
        )
        yield _step_tokens(loads)
        info = GAUGE("vllm:cache_config_info", "What a KV cache is.", labels=(*LABELS, *CACHE_LABELS))
        for client, one in described:
            dtype = one.kv_cache_dtype or one.dtype
            settings = (one.block_size, dtype, one.enable_prefix_caching, one.gpu_memory_utilization, one.num_blocks)
            info.add_metric((one.model, client.url, *map(str, settings)), 1.0)
        yield info
        read = GAUGE("saccade_step_weight_bytes", "Bytes of weights that a step with one token reads.", labels=LABELS)
        known = [((one.model, client.url), float(one.step_bytes)) for client, one in described if one.step_bytes]
        yield filled(read, known)
        ready = GAUGE("saccade_worker_ready", "Whether the worker takes requests.", labels=("worker",))
        yield filled(ready, [((client.url,), float(client.state.ready)) for client in clients])


def _step_tokens(loads: Iterable[tuple[tuple[str, str], Load]]) -> HistogramMetricFamily:
    """Return the histogram of tokens per step, which is empty for a worker that has not reported yet."""
    family = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens computed in a step.", labels=LABELS)
    bounds = [*(str(float(bound)) for bound in STEP_TOKEN_BOUNDS), "+Inf"]
    for labels, load in loads:
        counts = load.steps_by_tokens or (0,) * len(bounds)
        buckets = list(zip(bounds, map(float, itertools.accumulate(counts)), strict=True))
        family.add_metric(labels, buckets, load.step_tokens_total)
    return family

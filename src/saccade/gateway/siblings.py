"""Lets any of the gateway processes that share a port answer for all: they query each other and their common indexer.

On the metrics page, each process's own samples have the label `gateway_process`, and nothing is summed. A process that
does not answer is missing from the page. If there were sums, they would then fall and rise again, which Prometheus
would treat as a restart.
"""

import asyncio
import logging
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import TypeVar

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from saccade.fleet.feed import CacheListener
from saccade.fleet.index import BlockIndex, Partition
from saccade.fleet.lookup import LocalLookup, Targets
from saccade.fleet.pool import WorkerPool
from saccade.fleet.router import Router
from saccade.fleet.settings import RoutingSettings, SourceConfig
from saccade.fleet.sources import Discovery, find_workers
from saccade.gateway.config import INDEXER, Member
from saccade.gateway.tenants.report import TENANT_LABEL
from saccade.protocol.gateway_calls import (
    FindOverlaps,
    ForgetMedia,
    FoundOverlaps,
    IndexRequest,
    KnownWorkers,
    MetricFamily,
    ShowKnown,
    ShowMetrics,
    ShowUsage,
    ShowWork,
    SiblingRequest,
    TenantUsage,
    Work,
)
from saccade.transport.framing import UNREADABLE
from saccade.transport.local_calls import CallClient, CallServer, NotReached

LABEL = "gateway_process"
ANSWER_SECONDS = 2.0
SIGNALS = (signal.SIGTERM, signal.SIGINT)

logger = logging.getLogger(__name__)
T = TypeVar("T")


def families(registry: CollectorRegistry) -> list[MetricFamily]:
    """Return all metrics of *registry* with their current values."""
    return [
        MetricFamily(
            metric.name,
            metric.documentation,
            metric.type,
            [(sample.name, dict(sample.labels), float(sample.value)) for sample in metric.samples],
        )
        for metric in registry.collect()
    ]


class _Together(Collector):
    """Merges the metric families of several processes, labelled by process.

    *shared* has the metrics that are equal in all processes; these get no such label.
    """

    def __init__(self, by_process: Mapping[str, Sequence[MetricFamily]], shared: CollectorRegistry) -> None:
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


class _WithoutTenants(Collector):
    """Collects *all_metrics* except the families whose samples name tenants."""

    def __init__(self, all_metrics: Collector) -> None:
        self._all = all_metrics

    def collect(self) -> Iterable[Metric]:
        for metric in self._all.collect():
            if not any(TENANT_LABEL in sample.labels for sample in metric.samples):
                yield metric


class Siblings:
    """Answers a process's siblings, and queries them. A sibling that does not answer in time is left out.

    - member: this process's number; a single process has none, and answers only for itself.
    - work, forget_media, usages (by tenant): callbacks for this process's own state.
    - registry: this process's metrics.
    - shared: metrics that are equal in every process, such as the engines' reports.
    """

    def __init__(
        self,
        member: Member | None,
        work: Callable[[], Work],
        forget_media: Callable[[], None],
        registry: CollectorRegistry,
        shared: CollectorRegistry,
        usages: Callable[[], dict[str, TenantUsage]],
    ) -> None:
        self._member = member
        self._work = work
        self._forget_media = forget_media
        self._registry = registry
        self._shared = shared
        self._usages = usages
        self._decoder: msgspec.msgpack.Decoder[SiblingRequest] = msgspec.msgpack.Decoder(SiblingRequest)
        self._server: CallServer | None = None
        self._clients: dict[str, CallClient] = {}
        self._indexer: dict[str, CallClient] = {}
        if member is not None:
            self._server = CallServer(member.own, self.answer)
            self._clients = {name: CallClient(path) for name, path in member.siblings.items()}
            self._indexer = {INDEXER: CallClient(member.indexer)}

    @property
    def are_several(self) -> bool:
        """Whether several processes share the port."""
        return self._member is not None

    async def start(self) -> None:
        """Begin to listen and to connect. Raises OSError."""
        if self._server is not None:
            await self._server.start()
        for client in (*self._clients.values(), *self._indexer.values()):
            client.start()

    async def close(self) -> None:
        if self._server is not None:
            self._server.stop()
        await asyncio.gather(*(client.close() for client in (*self._clients.values(), *self._indexer.values())))

    def answer(self, request: bytes) -> bytes:
        """Return the encoded answer to an encoded SiblingRequest. Raises UNREADABLE."""
        match self._decoder.decode(request):
            case ShowMetrics():
                return msgspec.msgpack.encode(families(self._registry))
            case ShowWork():
                return msgspec.msgpack.encode(self._work())
            case ShowUsage():
                return msgspec.msgpack.encode(self._usages())
            case _:
                self._forget_media()
                return msgspec.msgpack.encode(None)

    async def metrics(self, *, with_tenants: bool = True) -> bytes:
        """Return the metrics of all processes in Prometheus' text format.

        If *with_tenants* is false, those that name tenants are left out.
        """
        if self._member is None:
            return generate_latest(self._registry if with_tenants else _WithoutTenants(self._registry))
        pages = await self._answers(self._clients | self._indexer, ShowMetrics(), list[MetricFamily])
        own = {str(self._member.number): families(self._registry)}
        merged = _Together(dict(sorted((own | pages).items())), self._shared)
        return generate_latest(merged if with_tenants else _WithoutTenants(merged))

    async def works(self) -> list[Work]:
        """Return the work of every process, this one first."""
        return [self._work(), *(await self._answers(self._clients, ShowWork(), Work)).values()]

    async def usages(self) -> list[dict[str, TenantUsage]]:
        """Return each process's usage, keyed by tenant name; this process comes first."""
        others = await self._answers(self._clients, ShowUsage(), dict[str, TenantUsage])
        return [self._usages(), *others.values()]

    async def forget_media(self) -> list[str]:
        """Empty the image and URL caches of all processes; return the names of the processes that did not answer."""
        self._forget_media()
        answers = await self._answers(self._clients, ForgetMedia(), type(None))
        return sorted(set(self._clients) - set(answers))

    async def _answers(
        self, clients: Mapping[str, CallClient], request: SiblingRequest | IndexRequest, kind: type[T]
    ) -> dict[str, T]:
        """Return the answers to *request* that arrive in time, keyed by process name."""
        encoded = msgspec.msgpack.encode(request)
        answers: dict[str, T] = {}

        async def ask(name: str, client: CallClient) -> None:
            try:
                answers[name] = msgspec.msgpack.decode(await client.call(encoded, ANSWER_SECONDS), type=kind)
            except (NotReached, *UNREADABLE):
                return

        await asyncio.gather(*(ask(name, client) for name, client in clients.items()))
        return answers


class Indexer:
    """Answers gateway processes at the Unix socket *path* from an index of the workers' caches.

    The index takes at most *index_bytes*.
    """

    def __init__(
        self, worker_pool: WorkerPool, path: Path, index_bytes: int = RoutingSettings.routing_index_bytes
    ) -> None:
        self._worker_pool = worker_pool
        self._listener = CacheListener(worker_pool, Router("auto", BlockIndex(index_bytes), Random()))
        self._lookup = LocalLookup(self._listener.router.index)
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._decoder: msgspec.msgpack.Decoder[IndexRequest] = msgspec.msgpack.Decoder(IndexRequest)
        self._encoder = msgspec.msgpack.Encoder()
        self._server = CallServer(path, self.answer)

    async def start(self) -> None:
        """Begin to listen, and to connect to the workers. Raises OSError."""
        await self._server.start()
        await self._worker_pool.start()

    async def close(self) -> None:
        self._server.stop()
        await self._listener.close()
        await self._worker_pool.close()

    def answer(self, request: bytes) -> bytes:
        """Return the encoded answer to an encoded IndexRequest. Raises UNREADABLE."""
        match self._decoder.decode(request):
            case FindOverlaps() as asked:
                return self._encoder.encode(self._overlaps(asked))
            case ShowKnown():
                feeds = {worker.url: self._listener.feed(worker) for worker in self._worker_pool.clients}
                return self._encoder.encode(KnownWorkers(feeds, self._listener.index_bytes))
            case _:
                return self._encoder.encode(families(self._registry))

    def _overlaps(self, request: FindOverlaps) -> FoundOverlaps:
        keys = {Partition(fingerprint, size): of_blocks for fingerprint, size, of_blocks in request.keys}
        partitions = list(keys)
        if any(not 0 <= place < len(partitions) for _, place in request.targets):
            raise msgspec.ValidationError("A target has no keys.")
        names = tuple(name for name, _ in request.targets)
        targets = Targets(names, tuple(partitions[place] for _, place in request.targets))
        overlaps = self._lookup.find(targets, keys, request.images)
        return FoundOverlaps(
            list(
                zip(
                    overlaps.num_blocks.tolist(),
                    overlaps.are_exact.tolist(),
                    overlaps.num_offloaded.tolist(),
                    strict=True,
                )
            ),
            [have_image.nonzero()[0].tolist() for have_image in overlaps.have_images],
        )


async def serve_index(
    worker_pool: WorkerPool, path: Path, urls: Sequence[str], sources: SourceConfig, index_bytes: int
) -> None:
    """Run an indexer for the workers at *urls* and from *sources* until SIGTERM or SIGINT.

    Raises StartupError and OSError.
    """
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, ended.set)
    indexer = Indexer(worker_pool, path, index_bytes)
    # No request runs here, so a dropped worker is forgotten at once.
    discovery = Discovery(worker_pool, lambda _: 0, 0.0)
    try:
        await indexer.start()
        await find_workers(discovery, urls, sources)
        logger.info("the indexer follows the workers' caches")
        await ended.wait()
    finally:
        await discovery.close()
        await indexer.close()

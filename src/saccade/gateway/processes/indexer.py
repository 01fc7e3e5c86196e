"""The indexer: a process that follows the caches of all workers once, for all gateway processes of its host."""

import asyncio
import logging
import signal
from collections.abc import Sequence
from pathlib import Path
from random import Random

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector

from saccade.gateway.config import RoutingSettings, SourceConfig
from saccade.gateway.processes.siblings import families
from saccade.gateway.workers.cache_listener import CacheListener
from saccade.gateway.workers.discovery import Discovery
from saccade.gateway.workers.pool import WorkerPool
from saccade.gateway.workers.sources import find_workers
from saccade.protocol.gateway_calls import FeedState, FindOverlaps, IndexRequest, KnownWorkers, Overlaps, ShowKnown
from saccade.routing.index import BlockIndex, Partition
from saccade.routing.lookup import LocalLookup, LookupTarget
from saccade.routing.router import Router
from saccade.transport.local_calls import CallServer

SIGNALS = (signal.SIGTERM, signal.SIGINT)

logger = logging.getLogger(__name__)


class Indexer:
    """Answers gateway processes at the Unix socket *path* from an index of *index_bytes* of the workers of *fleet*."""

    def __init__(self, fleet: WorkerPool, path: Path, index_bytes: int = RoutingSettings.routing_index_bytes) -> None:
        self._fleet = fleet
        self._listener = CacheListener(fleet, Router("auto", BlockIndex(index_bytes), Random()))
        self._lookup = LocalLookup(self._listener.router.index)
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._decoder: msgspec.msgpack.Decoder[IndexRequest] = msgspec.msgpack.Decoder(IndexRequest)
        self._encoder = msgspec.msgpack.Encoder()
        self._server = CallServer(path, self.answer)

    async def start(self) -> None:
        """Begin to listen, and to connect to the workers. Raises OSError."""
        await self._server.start()
        await self._fleet.start()

    async def close(self) -> None:
        self._server.stop()
        await self._listener.close()
        await self._fleet.close()

    def answer(self, request: bytes) -> bytes:
        """Return the encoded answer to an encoded IndexRequest. Raises UNREADABLE."""
        match self._decoder.decode(request):
            case FindOverlaps() as asked:
                return self._encoder.encode(self._overlaps(asked))
            case ShowKnown():
                return self._encoder.encode(self._feed_states())
            case _:
                return self._encoder.encode(families(self._registry))

    def _overlaps(self, request: FindOverlaps) -> Overlaps:
        keys = {Partition(fingerprint, size): of_blocks for fingerprint, size, of_blocks in request.keys}
        partitions = list(keys)
        if any(not 0 <= place < len(partitions) for _, place in request.targets):
            raise msgspec.ValidationError("A target has no keys.")
        overlaps = self._lookup.find([LookupTarget(name, partitions[place]) for name, place in request.targets], keys)
        return [(overlaps[name].num_blocks, overlaps[name].is_exact) for name, _ in request.targets]

    def _feed_states(self) -> KnownWorkers:
        workers = []
        for worker in self._fleet.clients:
            feed = self._listener.feed(worker)
            workers.append(
                FeedState(
                    url=worker.url,
                    exactness=worker.exactness,
                    reason=feed.reason,
                    num_blocks=self._listener.num_blocks(worker.url),
                    num_states=self._listener.num_states(worker.url),
                    num_events=feed.num_events,
                    num_snapshots=feed.num_snapshots,
                    num_lost=feed.num_lost,
                    num_orphans=feed.num_orphans,
                )
            )
        return KnownWorkers(workers, self._listener.index_bytes)


async def serve(fleet: WorkerPool, path: Path, urls: Sequence[str], sources: SourceConfig, index_bytes: int) -> None:
    """Run an indexer until SIGTERM or SIGINT, for the workers at *urls* and of *sources*. Raises StartupError."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, ended.set)
    indexer = Indexer(fleet, path, index_bytes)
    # No request runs here: a dropped worker is forgotten at once.
    members = Discovery(fleet, lambda _: 0, 0.0)
    await indexer.start()
    try:
        await find_workers(members, urls, sources)
        logger.info("the indexer follows the workers' caches")
        await ended.wait()
    finally:
        await members.close()
        await indexer.close()

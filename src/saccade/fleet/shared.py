"""A gateway process's view of the indexer's index: look-ups, and the state of each worker's feed."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from saccade.fleet.feed import ALONE, AWAY, CacheListener
from saccade.fleet.index import Partition
from saccade.fleet.lookup import Overlaps, Targets
from saccade.fleet.pool import WorkerPool
from saccade.fleet.router import Router
from saccade.fleet.worker import Worker
from saccade.protocol.exactness import Exactness, least
from saccade.protocol.gateway_calls import FeedState, FindOverlaps, FoundOverlaps, KnownWorkers, ShowKnown
from saccade.transport import lasting_task
from saccade.transport.framing import UNREADABLE
from saccade.transport.local_calls import CallClient, NotReached

LOOKUP_SECONDS = 1.0
"""A look-up takes less than a millisecond, more if the machine is busy."""

POLL_SECONDS = 0.25
"""Workers report their load as often."""

RETRY_SECONDS = 0.05
"""Time between two polls while the indexer does not answer."""

POLL_LIMIT_SECONDS = 5.0
UNREACHABLE = "the indexer of this host cannot be reached"

logger = logging.getLogger(__name__)


class SharedIndex:
    """Asks the indexer at the Unix socket *path*: a Lookup, and a view of all workers' caches.

    While the indexer does not answer, nothing is known about any worker, and *router* chooses by load. One late look-up
    is enough for that; look-ups resume once the indexer answers a poll.
    """

    def __init__(self, worker_pool: WorkerPool, router: Router, path: Path) -> None:
        self.router = router
        self._worker_pool = worker_pool
        self._calls = CallClient(path)
        self._encoder = msgspec.msgpack.Encoder()
        self._overlaps: msgspec.msgpack.Decoder[FoundOverlaps] = msgspec.msgpack.Decoder(FoundOverlaps)
        self._workers: msgspec.msgpack.Decoder[KnownWorkers] = msgspec.msgpack.Decoder(KnownWorkers)
        self._is_reached = False
        self._known: dict[str, FeedState] = {}
        self._task: asyncio.Task[None] | None = None
        self.index_bytes = 0
        worker_pool.on_change(self._note_away)

    def start(self) -> None:
        """Begin to connect; returns at once."""
        self._calls.start()
        self._task = lasting_task.begin(self._poll, "polls of the indexer")

    async def close(self) -> None:
        """End the connection and the polls."""
        await lasting_task.end(self._task)
        await self._calls.close()

    async def overlaps(
        self, targets: Targets, keys: Mapping[Partition, Sequence[bytes]], images: Sequence[bytes]
    ) -> Overlaps:
        """Return what *targets* hold, or nothing if the indexer does not answer or follows none of them."""
        unknown = Overlaps.unknown(len(targets.names), len(images))
        if not self._is_reached or not (images or any(map(self._is_followed, targets.names))):
            return unknown
        keys = keys or dict.fromkeys(targets.partitions, ())
        places = {partition: place for place, partition in enumerate(keys)}
        request = FindOverlaps(
            [(name, places[of]) for name, of in zip(targets.names, targets.partitions, strict=True)],
            [(fingerprint, size, list(of_blocks)) for (fingerprint, size), of_blocks in keys.items()],
            list(images),
        )
        try:
            found = self._overlaps.decode(await self._calls.call(self._encoder.encode(request), LOOKUP_SECONDS))
        except (NotReached, *UNREADABLE):
            self._note(is_reached=False)
            return unknown
        if len(found.of_targets) != len(targets.names) or len(found.holders) != len(images):
            return unknown
        for have_image, holders in zip(unknown.have_images, found.holders, strict=True):
            have_image[holders] = True
        return Overlaps(
            np.array([count for count, _, _ in found.of_targets], np.int64),
            np.array([is_exact for _, is_exact, _ in found.of_targets], np.bool_),
            unknown.have_images,
            np.array([count for _, _, count in found.of_targets], np.int64),
        )

    def feed(self, worker: Worker) -> FeedState:
        """Return the state of the feed of *worker*."""
        known = self._known.get(worker.url, FeedState(AWAY))
        if len(self._worker_pool.clients) < 2:
            return msgspec.structs.replace(known, reason=ALONE)
        return known if self._is_reached else msgspec.structs.replace(known, reason=UNREACHABLE)

    def _is_followed(self, worker: str) -> bool:
        return worker in self._known and not self._known[worker].reason

    async def _poll(self) -> None:
        """Poll the indexer for the state of the workers, until cancelled."""
        while True:
            try:
                encoded = await self._calls.call(self._encoder.encode(ShowKnown()), POLL_LIMIT_SECONDS)
                self._learn(self._workers.decode(encoded))
            except (NotReached, *UNREADABLE):
                self._note(is_reached=False)
            await asyncio.sleep(POLL_SECONDS if self._is_reached else RETRY_SECONDS)

    def _learn(self, answer: KnownWorkers) -> None:
        before, self._known = self._known, answer.workers
        self.index_bytes = answer.index_bytes
        for url, known in self._known.items():
            if url in before and known.num_lost != before[url].num_lost:
                self.router.expect_nothing(url)
        self._note(is_reached=True)

    def _note(self, *, is_reached: bool) -> None:
        """Store whether the indexer answers, and log a change."""
        if is_reached == self._is_reached:
            return
        self._is_reached = is_reached
        if is_reached:
            logger.info("routing: the indexer answers")
        else:
            self._known = {}
            logger.warning("routing: the caches of all workers are NONE: %s; workers are chosen by load", UNREACHABLE)

    def _note_away(self) -> None:
        """Expect nothing of workers that are not ready, or were replaced."""
        for worker in self._worker_pool.clients:
            if not worker.state.ready:
                self.router.note_away(worker.url)


CacheView = CacheListener | SharedIndex
"""What this process, or the indexer, knows of the workers' caches."""


def exactness(worker: Worker, cache_view: CacheView) -> Exactness:
    """Return how exact the index of *worker* is now: at its best once all its events have arrived.

    The reader of its feed has seen its events; this process has seen its answers to requests. The lower level counts.
    """
    feed = cache_view.feed(worker)
    if feed.reason:
        return Exactness("NONE", feed.reason)
    return least(feed.exactness, worker.state.exactness)

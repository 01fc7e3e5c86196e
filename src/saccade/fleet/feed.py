"""Keeps the router's index up to date with the cache events of the workers."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any

import msgspec

from saccade.errors import WorkerUnavailable
from saccade.fleet.index import Partition
from saccade.fleet.pool import WorkerPool
from saccade.fleet.router import Router
from saccade.fleet.worker import Worker
from saccade.protocol.exactness import Exactness
from saccade.protocol.gateway_calls import FeedState
from saccade.protocol.kv_events import KvEvents
from saccade.transport import lasting_task
from saccade.transport.backoff import Backoff

FULL_SECONDS, MOST_FULL_SECONDS = 1.0, 300.0
"""First and longest wait before a worker whose blocks did not fit the index is tried again; the wait doubles."""

FULL = "the index is full"

EVENTS_PER_TURN = 1024
"""Events of all feeds together between two pauses; decoding and indexing them takes about a millisecond."""

PAUSE_SECONDS = 0.001

ALONE = "a fleet of one worker needs no reports"
STARTING = "its snapshot has not arrived yet"
AWAY = "it is not ready"
NOT_READY = Exactness("NONE", AWAY)

logger = logging.getLogger(__name__)


class CacheListener:
    """Follows the feed of every ready worker in *worker_pool*, each in a task, and updates *router*'s index.

    Of a worker that is alone, or whose blocks do not fit the index, only the images are followed. A lost feed is
    requested again; until then, nothing is known about its worker. Events never take more than half of the event loop:
    after EVENTS_PER_TURN events all feeds pause for PAUSE_SECONDS, and each turn of the loop handles one message. Tests
    replace *sleep*.
    """

    def __init__(
        self,
        worker_pool: WorkerPool,
        router: Router,
        sleep: Callable[[float], Coroutine[Any, Any, None]] = asyncio.sleep,
    ) -> None:
        self.router = router
        self._worker_pool = worker_pool
        self._sleep = sleep
        self._feeds: dict[str, FeedState] = {}
        self._logged: dict[str, Exactness] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._scopes: dict[str, asyncio.Timeout] = {}
        self._turn = asyncio.Lock()
        self._are_several = asyncio.Event()
        self._num_since_pause = 0
        worker_pool.on_change(self._listen)
        worker_pool.on_forget(self._forget)

    def feed(self, worker: Worker) -> FeedState:
        """Return the current state of *worker*'s feed."""
        known = worker.state.exactness
        if len(self._worker_pool.clients) < 2:
            feed = FeedState(ALONE)
        elif known.level == "NONE":
            feed = FeedState(known.reason)
        else:
            feed = self._feeds.setdefault(worker.url, FeedState(AWAY))
        feed.exactness = known
        feed.num_blocks = self.router.index.num_blocks(worker.url)
        feed.num_states = self.router.index.num_states(worker.url)
        return feed

    @property
    def index_bytes(self) -> int:
        """Estimated memory of the index."""
        return self.router.index.num_bytes

    async def close(self) -> None:
        """Stop listening."""
        await lasting_task.end(*self._tasks.values())

    async def _forget(self, url: str) -> None:
        self._feeds.pop(url, None)
        if (task := self._tasks.pop(url, None)) is not None:
            await lasting_task.end(task)
            await self._sweep()
        self._logged.pop(url, None)

    async def _sweep(self) -> None:
        for _ in iter(self.router.index.sweep, False):
            await self._sleep(0)

    def _listen(self) -> None:
        """Follow workers that have become ready; expect nothing of those that are not, or were replaced."""
        are_several = len(self._worker_pool.clients) > 1
        (self._are_several.set if are_several else self._are_several.clear)()
        for worker in self._worker_pool.clients:
            state, running = worker.state, self._tasks.get(worker.url)
            if not state.ready:
                self.router.note_away(worker.url)
            is_followed = state.ready and state.exactness.level != "NONE" and (are_several or state.reports_images)
            if is_followed and (running is None or running.done()):
                following = partial(self._keep_up, worker)
                self._tasks[worker.url] = lasting_task.begin(following, f"cache events of {worker.url}")

    async def _keep_up(self, worker: Worker) -> None:
        """Follow the feed while the worker is ready; if it is lost, forget the worker and request it again."""
        feed = self._feeds.setdefault(worker.url, FeedState(AWAY))
        lost, full = _backoff(), Backoff(FULL_SECONDS, MOST_FULL_SECONDS, healthy_seconds=2 * MOST_FULL_SECONDS)
        try:
            while worker.state.ready:
                if not self._are_several.is_set():
                    await self._follow_images(worker, self._until_several())
                    continue
                lost.started()
                full.started()
                has_room = await self._follow_once(worker, feed)
                await self._sweep()
                if has_room:
                    await self._sleep(lost.after_failure())
                else:
                    await self._follow_images(worker, self._sleep(full.after_failure()))
        finally:
            # Closing the connection cancels this task, too.
            self._note(worker, feed, AWAY)

    async def _until_several(self) -> None:
        await self._are_several.wait()

    async def _follow_images(self, worker: Worker, end: Coroutine[Any, Any, None]) -> None:
        """Follow only the worker's images, if it reports them, until *end* returns or the worker is away."""

        async def keep_up() -> None:
            lost = _backoff()
            while worker.state.ready:
                lost.started()
                try:
                    self.router.index.begin_images(worker.url)
                    await self._read(worker, FeedState(), blocks=False)
                except WorkerUnavailable as error:
                    logger.debug("%s", error.message)
                finally:
                    self.router.index.forget(worker.url)
                await self._sweep()
                await self._sleep(lost.after_failure())

        await (lasting_task.until_one_ends(keep_up(), end) if worker.state.reports_images else end)

    async def _follow_once(self, worker: Worker, feed: FeedState) -> bool:
        """Follow one feed to its end. Return False if it ended because the index has no room for the worker."""
        try:
            async with asyncio.timeout(None) as scope:
                self._scopes[worker.url] = scope
                await self._follow(worker, feed)
        except TimeoutError:
            if not scope.expired():
                raise
        except WorkerUnavailable as error:
            feed.num_lost += 1
            self._note(worker, feed, error.message)
            return True
        finally:
            self._scopes.pop(worker.url, None)
            self.router.index.forget(worker.url)
            self.router.expect_nothing(worker.url)
        limit = self.router.index.max_bytes
        self._note(worker, feed, f"{FULL}: its limit is {limit} bytes; see --routing-index-bytes")
        return False

    async def _follow(self, worker: Worker, feed: FeedState) -> None:
        """Index what the worker reports; return if the index has no room for it."""
        index, description = self.router.index, worker.state.description
        if description is None:
            raise WorkerUnavailable(AWAY)
        partition = Partition(description.fingerprint, description.block_size)
        is_known = index.begin(
            worker.url,
            partition,
            resumes_at_states=description.resumes_at_states,
            num_blocks=description.num_blocks,
            window=description.window,
        )
        if not is_known:
            return
        if feed.reason == AWAY:
            feed.reason = STARTING
        await self._read(worker, feed, blocks=True)

    async def _read(self, worker: Worker, feed: FeedState, *, blocks: bool) -> None:
        """Index what a feed of the worker reports. Raises WorkerUnavailable at its end."""
        async with contextlib.aclosing(worker.kv_events(blocks=blocks)) as messages:
            async for message in messages:
                for piece in _pieces(message):
                    await self._learn(worker, feed, piece)

    async def _learn(self, worker: Worker, feed: FeedState, message: KvEvents) -> None:
        """Index one message when it is this worker's turn. The feed of an evicted worker ends."""
        index = self.router.index
        async with self._turn:
            feed.num_orphans += index.take(worker.url, message)
            feed.num_events += len(message.events)
            # All feeds wait until the memory is free again.
            while index.is_over:
                await self._sweep()
                if index.is_over:
                    # A deadline in the past ends the feed before its next turn.
                    self._scopes[index.evict()].reschedule(0)
            if self.router.index.is_exact(worker.url):
                feed.num_snapshots += feed.reason != ""
                # The worker's own level may change with any message.
                self._note(worker, feed, "")
            self._num_since_pause += len(message.events)
            pauses = self._num_since_pause >= EVENTS_PER_TURN
            if pauses:
                self._num_since_pause = 0
            await self._sleep(PAUSE_SECONDS if pauses else 0)

    def _note(self, worker: Worker, feed: FeedState, reason: str) -> None:
        """Store why nothing is known about a worker, or "" if its feed is followed; log a change of its exactness."""
        feed.reason = reason
        known = Exactness("NONE", reason) if reason else worker.state.exactness
        if known == self._logged.get(worker.url, NOT_READY):
            return
        self._logged[worker.url] = known
        # The pool has a line for a worker that is not ready.
        level = logging.DEBUG if reason == AWAY else logging.WARNING if reason else logging.INFO
        why = known.reason or "all that they hold is known"
        logger.log(level, "routing: the caches of worker %s are %s: %s", worker.url, known.level, why)


def _backoff() -> Backoff:
    """Return the waits between two feeds of a worker, if the first was lost."""
    return Backoff(first_seconds=0.05, limit_seconds=10.0, healthy_seconds=5.0)


def _pieces(message: KvEvents) -> Iterator[KvEvents]:
    """Yield *message* in pieces of EVENTS_PER_TURN events; only the last piece of a snapshot's last message is last."""
    if len(message.events) <= EVENTS_PER_TURN:
        yield message
        return
    for start in range(0, len(message.events), EVENTS_PER_TURN):
        stop = start + EVENTS_PER_TURN
        is_last = message.last and stop >= len(message.events)
        yield msgspec.structs.replace(message, events=message.events[start:stop], last=is_last)

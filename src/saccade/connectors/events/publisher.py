"""Receives the batches of cache events that vLLM and SGLang publish over ZeroMQ: subscribes, replays and fills gaps.

An engine numbers its batches from 0 in each process, and keeps the latest ones for replay (`buffer_steps`, 10,000 by
default). It sends no snapshot.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Callable
from typing import NamedTuple

import zmq
import zmq.asyncio
from zmq import Event
from zmq.utils.monitor import recv_monitor_message

from saccade.connectors.events.event_source import EventSource
from saccade.errors import WorkerUnavailable

CONNECT_SECONDS = 5.0
REPLAY_SECONDS = 30.0
"""How long the first batch of a replay may take."""

QUIET_SECONDS = 2.0
"""How long each further batch may take. If it does not come, a part of the replay was dropped."""

IDLE_SECONDS = 5.0
"""After this time without a batch, ask the engine whether one was lost."""

HEARTBEAT_SECONDS = 5.0
MAX_BATCH_BYTES = 8 << 20
"""An id takes 5 bytes at most, so a prompt of a million tokens fits, with the hashes of its blocks."""

MAX_QUEUED_BATCHES = 32
"""ZeroMQ counts messages, not bytes. Further ones wait at the publisher. If it drops them, they are asked for again."""

BEFORE_HANDSHAKE = (Event.CONNECT_DELAYED, Event.CONNECTED)
REPLAY_ENDS = b"\xff" * 8

NO_REPLAY = "it has no `replay_endpoint`, so blocks that it stored before the gateway listened are not known"
REPLAY_BEGINS_LATE = "its replay buffer begins with batch {first}, so blocks that it stored before are not known"
RESTARTED = "The worker's cache events begin anew."
LOST = "The worker's cache events from batch {first} on were lost."
UNREADABLE_BATCH = "The worker's cache events have an unknown form."


class _PublishedBatch(NamedTuple):
    """A batch as the engine sent it: *payload* is one msgpack value."""

    number: int
    payload: bytes


class PublishedBatches:
    """The batches of one engine, each once and in order: first replayed(), then published().

    It calls *on_missing* with the reason why batches before the first one are not known, or with "" if there are none.
    Use it as a context manager; entering connects, and raises WorkerUnavailable if nobody answers.
    """

    def __init__(self, source: EventSource, on_missing: Callable[[str], None]) -> None:
        self._sockets = _Sockets(source)
        self._on_missing = on_missing
        self._next: int | None = None

    async def __aenter__(self) -> "PublishedBatches":
        try:
            await self._sockets.subscribe()
        except BaseException:
            self._sockets.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._sockets.close()

    async def replayed(self) -> AsyncGenerator[bytes, None]:
        """Yield the earlier batches, as far as the engine still has them. Raises as published() does."""
        if not self._sockets.can_replay:
            self._on_missing(NO_REPLAY)
            return
        async with contextlib.aclosing(self._caught_up(0)) as batches:
            async for batch in batches:
                if self._next is None and batch.number:
                    self._on_missing(REPLAY_BEGINS_LATE.format(first=batch.number))
                self._next = batch.number + 1
                yield batch.payload
        self._next = self._next or 0

    async def published(self) -> AsyncGenerator[bytes, None]:
        """Yield the batches from now on. Raises WorkerUnavailable if a batch is lost for good."""
        last = -1
        while True:
            batch = await self._sockets.next_batch(IDLE_SECONDS if self._sockets.can_replay else math.inf)
            if batch is not None and batch.number <= last:
                raise WorkerUnavailable(RESTARTED)
            last = last if batch is None else batch.number
            if self._next is None and batch is not None:
                self._next = batch.number
                self._on_missing(NO_REPLAY if batch.number else "")
            if batch is None or batch.number > (self._next or 0):
                async with contextlib.aclosing(self._filled(batch)) as payloads:
                    async for payload in payloads:
                        yield payload
            if batch is not None and batch.number == self._next:
                self._next += 1
                yield batch.payload

    async def _filled(self, until: _PublishedBatch | None) -> AsyncGenerator[bytes, None]:
        """Yield the batches before *until*, or those that were lost unnoticed. Raises WorkerUnavailable for a gap."""
        first = self._next or 0
        if self._sockets.can_replay:
            async with contextlib.aclosing(self._caught_up(first)) as batches:
                async for batch in batches:
                    if batch.number != self._next:
                        raise WorkerUnavailable(LOST.format(first=self._next))
                    self._next += 1
                    yield batch.payload
        if until is not None and until.number > (self._next or 0):
            raise WorkerUnavailable(LOST.format(first=self._next))

    async def _caught_up(self, first: int) -> AsyncGenerator[_PublishedBatch, None]:
        """Yield the batches since *first* that the worker still has; only the first one may have a later number.

        A publisher drops what a subscriber does not read fast enough, so after a gap this asks for the rest again.
        """
        next_number, has_begun = first, False
        while True:
            begin = next_number
            async with contextlib.aclosing(self._sockets.replay(begin)) as replay:
                async for batch in replay:
                    if batch is None:
                        return
                    if has_begun and batch.number > next_number:
                        break
                    if batch.number >= next_number:
                        next_number, has_begun = batch.number + 1, True
                        yield batch
            if next_number == begin:
                raise WorkerUnavailable(LOST.format(first=begin))


class _Sockets:
    """The connections to one publisher. A lost connection is not made again: another process may answer."""

    def __init__(self, source: EventSource) -> None:
        self.can_replay = source.replay_endpoint is not None
        self._source = source
        self._context: zmq.asyncio.Context = zmq.asyncio.Context()
        self._subscription = self._socket(zmq.SUB)
        self._monitor = self._subscription.get_monitor_socket()
        self._poller = zmq.asyncio.Poller()
        self._poller.register(self._subscription, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def close(self) -> None:
        self._subscription.disable_monitor()
        self._context.destroy(linger=0)

    async def subscribe(self) -> None:
        """Connect to the publisher. Raises WorkerUnavailable if none answers."""
        endpoint = self._source.endpoint
        self._subscription.reconnect_ivl = -1
        self._subscription.subscribe(self._source.topic.encode())
        unanswered = (
            f"No publisher of cache events answers at {endpoint}; `endpoint` of vLLM's --kv-events-config must contain "
            "`*`, as in tcp://*:5557."
        )
        try:
            self._subscription.connect(endpoint)
            async with asyncio.timeout(CONNECT_SECONDS):
                event: int = Event.CONNECT_DELAYED
                while event in BEFORE_HANDSHAKE:
                    event = (await recv_monitor_message(self._monitor))["event"]
        except (zmq.ZMQError, TimeoutError) as error:
            raise WorkerUnavailable(unanswered) from error
        if event != Event.HANDSHAKE_SUCCEEDED:
            raise WorkerUnavailable(unanswered)

    async def next_batch(self, seconds: float) -> _PublishedBatch | None:
        """Return the next batch that is published, or None if there is none for *seconds*.

        Raises WorkerUnavailable if the connection is lost.
        """
        await asyncio.sleep(0)  # Batches that have arrived are received without a turn of the event loop.
        ready = dict(await self._poller.poll(None if seconds == math.inf else round(1000 * seconds)))
        if self._monitor in ready:  # After the handshake the connection has one more event, its end.
            raise WorkerUnavailable("The worker's feed of cache events ended.")
        return _batch(await self._subscription.recv_multipart()) if ready else None

    async def replay(self, first: int) -> AsyncGenerator[_PublishedBatch | None, None]:
        """Yield the batches since number *first* that the worker still has, then None if it reported the end."""
        with contextlib.closing(self._socket(zmq.DEALER)) as dealer:
            dealer.linger = 0
            try:
                dealer.connect(self._source.replay_endpoint or "")
                await dealer.send_multipart([b"", first.to_bytes(8, "big")])
                seconds = REPLAY_SECONDS
                while True:
                    async with asyncio.timeout(seconds):
                        frames = await dealer.recv_multipart()
                    seconds = QUIET_SECONDS
                    await asyncio.sleep(0)  # Batches that have arrived are received without a turn of the event loop.
                    # Older releases send no topic here, so the frames are counted from the end.
                    if frames[-2:-1] == [REPLAY_ENDS]:
                        yield None
                        return
                    yield _batch(frames)
            except (zmq.ZMQError, TimeoutError):
                return

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket: zmq.asyncio.Socket = self._context.socket(kind)
        socket.maxmsgsize = MAX_BATCH_BYTES
        socket.rcvhwm = MAX_QUEUED_BATCHES
        # tcp://* listens on IPv4 only, so a name that resolves to both families is asked for IPv4.
        socket.ipv6 = "[" in self._source.endpoint
        socket.heartbeat_ivl = round(1000 * HEARTBEAT_SECONDS)
        socket.heartbeat_timeout = round(3000 * HEARTBEAT_SECONDS)
        return socket


def _batch(frames: list[bytes]) -> _PublishedBatch:
    if len(frames) < 2 or len(frames[-2]) != 8:
        raise WorkerUnavailable(UNREADABLE_BATCH)
    return _PublishedBatch(int.from_bytes(frames[-2], "big"), frames[-1])

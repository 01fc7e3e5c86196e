"""Follow the KV cache events of a vLLM worker: subscribe, replay what was published before, fill gaps.

vLLM numbers its batches from 0 in each process and keeps the latest of them (`buffer_steps`, 10,000 by default) for
replay; there is no snapshot. So the replayed batches are our snapshot, which is whole only where the replay begins
with batch 0. Batches are decoded and keys are computed on the event loop, at most MAX_EVENTS at a time.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import zmq
import zmq.asyncio
from zmq import Event
from zmq.utils.monitor import recv_monitor_message

from saccade.errors import WorkerUnavailable
from saccade.protocol.kv_events import KvEvent, KvEvents
from saccade.transport.dialects.vllm_events_wire import BatchDecoder
from saccade.transport.dialects.vllm_keys import Coverage, KeyContext, ReportedBlocks
from saccade.transport.framing import UNREADABLE

CONNECT_SECONDS = 5.0
REPLAY_SECONDS = 5.0
"""How long the next replayed batch may take."""

IDLE_SECONDS = 5.0
"""After so long without a batch the worker is asked whether one was lost."""

HEARTBEAT_SECONDS = 5.0
MAX_EVENTS = 256
"""Events in one of our messages, and so what is worked on in one turn of the event loop."""

MAX_BATCH_BYTES = 64 << 20
MAX_QUEUED_BATCHES = 10_000
BEFORE_HANDSHAKE = (Event.CONNECT_DELAYED, Event.CONNECTED)
REPLAY_ENDS = b"\xff" * 8

NO_REPLAY = "it has no `replay_endpoint`, so blocks that it stored before the gateway listened are not known"
REPLAY_BEGINS_LATE = "its replay buffer begins with batch {first}, so blocks that it stored before are not known"
RESTARTED = "The worker's cache events begin anew."
LOST = "The worker's cache events from batch {first} on were lost."


@dataclass(frozen=True)
class EventSource:
    """Where one engine (a data-parallel rank of a worker) publishes: ZeroMQ endpoints to connect to, and the topic."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""


def event_source(host: str, published: Mapping[str, Any]) -> EventSource | None:
    """Return the source that an entry of vLLM's `/kv_event_sources` describes, for a worker on *host*.

    Return None where that engine publishes nothing. A wildcard stands for every address of the worker's host.
    """
    endpoint, replay, topic = (published.get(name) for name in ("endpoint", "replay_endpoint", "topic"))
    is_on = published.get("enable_kv_cache_events", True) and published.get("publisher") in (None, "zmq")
    if not is_on or not isinstance(endpoint, str):
        return None
    return EventSource(
        _reachable(endpoint, host), _reachable(replay, host) if isinstance(replay, str) else None, str(topic or "")
    )


def _reachable(endpoint: str, host: str) -> str:
    scheme, _, rest = endpoint.partition("://")
    address, colon, port = rest.rpartition(":")
    if scheme != "tcp" or not colon or address not in ("*", "[::]", "::", "0.0.0.0"):  # noqa: S104 - read, not bound
        return endpoint
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


async def follow(source: EventSource, context: KeyContext, coverage: Coverage) -> AsyncGenerator[KvEvents, None]:
    """Yield what the worker's cache holds in our keys: a snapshot's messages, then increments.

    *coverage* tells, while this runs, how exactly the worker can be known by its events.
    Raises WorkerUnavailable where the feed cannot be had, ends, or loses a batch for good; what was learnt from it is
    void then; ask again.
    """
    coverage.begin()
    blocks = ReportedBlocks(context, coverage)
    with contextlib.closing(_Sockets(source)) as sockets:
        await sockets.subscribe()
        batches = _Batches(sockets, coverage)
        async with contextlib.aclosing(batches.replayed()) as replayed:
            async for payload in replayed:
                for events in _translated(blocks, payload):
                    yield KvEvents(0, events, snapshot=True, last=False)
        yield KvEvents(0, [], snapshot=True)
        number = 0
        async with contextlib.aclosing(batches.published()) as published:
            async for payload in published:
                for events in _translated(blocks, payload):
                    number += 1
                    yield KvEvents(number, events)


def _translated(blocks: ReportedBlocks, payload: bytes) -> Iterator[list[KvEvent]]:
    """Yield the events of a batch in our keys, at most MAX_EVENTS at a time."""
    events: list[KvEvent] = []
    try:
        for foreign in BatchDecoder().events(payload):
            for event in blocks.take(foreign):
                events.append(event)
                if len(events) == MAX_EVENTS:
                    yield events
                    events = []
    except UNREADABLE as error:
        raise WorkerUnavailable("The worker's cache events are not of a form that is known.") from error
    if events:
        yield events


class _Batch(NamedTuple):
    number: int
    payload: bytes


class _Batches:
    """The batches of one publisher, each once and in order, from those that are published and those replayed."""

    def __init__(self, sockets: "_Sockets", coverage: Coverage) -> None:
        self._sockets = sockets
        self._coverage = coverage
        self._next: int | None = None

    async def replayed(self) -> AsyncGenerator[bytes, None]:
        """Yield what was published before, as far as the worker still has it."""
        if not self._sockets.can_replay:
            self._coverage.earlier = NO_REPLAY
            return
        async with contextlib.aclosing(self._caught_up(0)) as batches:
            async for batch in batches:
                if self._next is None and batch.number:
                    self._coverage.earlier = REPLAY_BEGINS_LATE.format(first=batch.number)
                self._next = batch.number + 1
                yield batch.payload
        self._next = self._next or 0

    async def published(self) -> AsyncGenerator[bytes, None]:
        """Yield what is published from now on. Raises WorkerUnavailable where a batch is lost for good."""
        last = -1
        while True:
            batch = await self._sockets.next_batch(IDLE_SECONDS if self._sockets.can_replay else math.inf)
            if batch is not None and batch.number <= last:
                raise WorkerUnavailable(RESTARTED)
            last = last if batch is None else batch.number
            if self._next is None and batch is not None:
                self._next = batch.number
                self._coverage.earlier = NO_REPLAY if batch.number else ""
            if batch is None or batch.number > (self._next or 0):
                async with contextlib.aclosing(self._filled(batch)) as payloads:
                    async for payload in payloads:
                        yield payload
            if batch is not None and batch.number == self._next:
                self._next += 1
                yield batch.payload

    async def _filled(self, until: _Batch | None) -> AsyncGenerator[bytes, None]:
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

    async def _caught_up(self, first: int) -> AsyncGenerator[_Batch, None]:
        """Yield the batches from *first* on that the worker still has; only the first may have a later number.

        A publisher drops what a subscriber does not take fast enough, so a replay may have gaps: ask for the rest.
        """
        wanted, has_begun = first, False
        while True:
            asked = wanted
            async with contextlib.aclosing(self._sockets.replay(asked)) as replay:
                async for batch in replay:
                    if batch is None:
                        return
                    if has_begun and batch.number > wanted:
                        break
                    if batch.number >= wanted:
                        wanted, has_begun = batch.number + 1, True
                        yield batch
            if wanted == asked:
                raise WorkerUnavailable(LOST.format(first=asked))


class _Sockets:
    """The connections to one publisher. A connection that is lost is not made again: it may be another process's."""

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
        """Close all connections."""
        self._subscription.disable_monitor()
        self._context.destroy(linger=0)

    async def subscribe(self) -> None:
        """Connect to the publisher. Raises WorkerUnavailable where none answers."""
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

    async def next_batch(self, seconds: float) -> _Batch | None:
        """Return the next batch that is published, or None where none is for *seconds*.

        Raises WorkerUnavailable where the connection is lost.
        """
        ready = dict(await self._poller.poll(None if seconds == math.inf else round(1000 * seconds)))
        if self._monitor in ready:  # after the handshake the connection has one more event, its end
            raise WorkerUnavailable("The worker's feed of cache events ended.")
        return _batch(await self._subscription.recv_multipart()) if ready else None

    async def replay(self, first: int) -> AsyncGenerator[_Batch | None, None]:
        """Yield the batches from number *first* on that the worker still has, and then None where it said so."""
        with contextlib.closing(self._socket(zmq.DEALER)) as dealer:
            dealer.linger = 0
            try:
                dealer.connect(self._source.replay_endpoint or "")
                await dealer.send_multipart([b"", first.to_bytes(8, "big")])
                while True:
                    async with asyncio.timeout(REPLAY_SECONDS):
                        frames = await dealer.recv_multipart()
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
        # A name that resolves to both families is asked for IPv4, since tcp://* listens on IPv4 only.
        socket.ipv6 = "[" in self._source.endpoint
        socket.heartbeat_ivl = round(1000 * HEARTBEAT_SECONDS)
        socket.heartbeat_timeout = round(3000 * HEARTBEAT_SECONDS)
        return socket


def _batch(frames: list[bytes]) -> _Batch:
    if len(frames) < 2 or len(frames[-2]) != 8:
        raise WorkerUnavailable("The worker's cache events are not of a form that is known.")
    return _Batch(int.from_bytes(frames[-2], "big"), frames[-1])

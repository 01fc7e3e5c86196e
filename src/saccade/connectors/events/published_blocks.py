"""Follows the KV cache events of a vLLM worker, in our block keys.

The replayed batches are our snapshot, which is complete only if the replay begins with batch 0. The event loop decodes
batches and computes keys, at most MAX_EVENTS at a time.
"""

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from functools import partial
from typing import Any

from saccade.connectors.events.batches import BatchDecoder, Event
from saccade.connectors.events.block_keys import Coverage, KeyContext, ReportedBlocks
from saccade.connectors.events.publisher import UNREADABLE_BATCH, EventSource, PublishedBatches
from saccade.errors import StartupError, WorkerUnavailable
from saccade.protocol.kv_events import KvEvent, KvEvents
from saccade.transport.framing import UNREADABLE
from saccade.transport.named_addresses import on_host_of_worker

OTHER_HOST = (
    "its --kv-events-config names an endpoint of another host or kind; it must be tcp:// with `*` or with the host of "
    "the worker's address, as in tcp://*:5557"
)
MAX_EVENTS = 256
"""Events in one of our messages, or the engine's events in one, and so the work of one turn of the loop."""


def event_source(host: str, published: Mapping[str, Any]) -> EventSource | None:
    """Return the source that an entry of vLLM's `/kv_event_sources` describes, for a worker on *host*.

    Return None if that engine publishes nothing. Raises StartupError if it names another host or kind of socket.
    """
    endpoint, replay, topic = (published.get(name) for name in ("endpoint", "replay_endpoint", "topic"))
    is_on = published.get("enable_kv_cache_events", True) and published.get("publisher") in (None, "zmq")
    if not is_on or not isinstance(endpoint, str):
        return None
    return EventSource(
        _reachable(endpoint, host), _reachable(replay, host) if isinstance(replay, str) else None, str(topic or "")
    )


def _reachable(endpoint: str, host: str) -> str:
    reachable = on_host_of_worker(endpoint, host)
    if reachable is None:
        raise StartupError(OTHER_HOST)
    return reachable


def follow(source: EventSource, context: KeyContext, coverage: Coverage) -> AsyncGenerator[KvEvents, None]:
    """Yield what the worker's cache holds in our keys: a snapshot's messages, then increments.

    While this runs, *coverage* says how exactly the events describe the worker. Raises WorkerUnavailable if the feed is
    not available, ends, or loses a batch for good. Then discard what it reported, and call again.
    """
    coverage.begin()
    return translated(source, ReportedBlocks(context, coverage).take, coverage.note_missing)


async def translated(
    source: EventSource, take: Callable[[Event], Iterator[KvEvent]], on_missing: Callable[[str], None]
) -> AsyncGenerator[KvEvents, None]:
    """Yield what an engine publishes as a snapshot's messages, then increments; *take* yields what an event means.

    It calls *on_missing* with the reason why earlier contents are not known, or with "" if there were none. Raises
    WorkerUnavailable as follow() does.
    """
    parts = partial(_parts, BatchDecoder(), take)
    async with PublishedBatches(source, on_missing) as batches:
        async with contextlib.aclosing(batches.replayed()) as replayed:
            async for payload in replayed:
                for events in parts(payload):
                    yield KvEvents(0, events, snapshot=True, last=False)
        yield KvEvents(0, [], snapshot=True)
        number = 0
        async with contextlib.aclosing(batches.published()) as published:
            async for payload in published:
                for events in parts(payload):
                    number += 1
                    yield KvEvents(number, events)


def _parts(
    decoder: BatchDecoder, take: Callable[[Event], Iterator[KvEvent]], payload: bytes
) -> Iterator[list[KvEvent]]:
    """Yield what the events of a batch mean, at most MAX_EVENTS at a time.

    Raises WorkerUnavailable for other bytes, and for numbers that cannot be a token id or an image's place.
    """
    events: list[KvEvent] = []
    try:
        for count, reported in enumerate(decoder.events(payload), 1):
            for event in take(reported):
                events.append(event)
                if len(events) == MAX_EVENTS:
                    yield events
                    events = []
            if count % MAX_EVENTS == 0:
                # Events that mean nothing here take time, too.
                yield events
                events = []
    except (*UNREADABLE, OverflowError) as error:
        raise WorkerUnavailable(UNREADABLE_BATCH) from error
    if events:
        yield events

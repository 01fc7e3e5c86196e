"""Follows the KV cache events that vLLM, SGLang or TokenSpeed publish over ZeroMQ, in our block keys.

The replayed batches are our snapshot, which is complete only if the replay begins with batch 0. The event loop decodes
batches and computes keys, at most MAX_EVENTS at a time.
"""

import contextlib
from collections.abc import AsyncGenerator, Iterator

from saccade.connectors.events.batches import BatchDecoder
from saccade.connectors.events.event_source import EventSource
from saccade.connectors.events.publisher import UNREADABLE_BATCH, PublishedBatches
from saccade.connectors.events.reported_cache import ReportedCache
from saccade.errors import WorkerUnavailable
from saccade.protocol.kv_events import KvEvent, KvEvents
from saccade.transport.framing import UNREADABLE

MAX_EVENTS = 256
"""Events in one of our messages, or the engine's events in one, and so the work of one turn of the loop."""


async def follow(source: EventSource, cache: ReportedCache) -> AsyncGenerator[KvEvents, None]:
    """Yield what *cache* learns from *source*: a snapshot's messages, then increments.

    Raises WorkerUnavailable if the feed is not available, ends, or loses a batch for good. Then discard what it
    reported, and follow it with another cache.
    """

    def note_missing(reason: str) -> None:
        cache.earlier = reason

    decoder = BatchDecoder()
    async with PublishedBatches(source, note_missing) as batches:
        async with contextlib.aclosing(batches.replayed()) as replayed:
            async for payload in replayed:
                for events in _parts(decoder, cache, payload):
                    yield KvEvents(0, events, snapshot=True, last=False)
        yield KvEvents(0, [], snapshot=True)
        number = 0
        async with contextlib.aclosing(batches.published()) as published:
            async for payload in published:
                for events in _parts(decoder, cache, payload):
                    number += 1
                    yield KvEvents(number, events)


def _parts(decoder: BatchDecoder, cache: ReportedCache, payload: bytes) -> Iterator[list[KvEvent]]:
    """Yield what the events of a batch mean, at most MAX_EVENTS at a time.

    Raises WorkerUnavailable for other bytes, and for numbers that cannot be a token id or an image's place.
    """
    events: list[KvEvent] = []
    try:
        for count, reported in enumerate(decoder.events(payload), 1):
            for event in cache.take(reported):
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

"""Reads the feed of a worker's cache events: messages in order and without gaps, or an error."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import msgspec

from saccade.errors import WorkerUnavailable
from saccade.protocol.kv_events import ImageRemoved, ImageStored, KvEvents
from saccade.transport.backoff import Backoff
from saccade.transport.framing import UNREADABLE
from saccade.transport.message_pack import num_items
from saccade.transport.proto.worker_pb2 import KvEventsRequest

MAX_EVENTS = 4096
"""Of a message, whose bytes are those of saccade.transport.wire."""

logger = logging.getLogger(__name__)


class _Whole(msgspec.Struct, array_like=True):
    """A KvEvents that is not decoded yet."""

    number: msgspec.Raw
    events: msgspec.Raw


def _message_of(payload: bytes) -> KvEvents:
    """Return the message in *payload*. Raises UNREADABLE, including for too many events."""
    if num_items(memoryview(msgspec.msgpack.decode(payload, type=_Whole).events)) > MAX_EVENTS:
        raise msgspec.ValidationError("a message has too many events")
    return msgspec.msgpack.decode(payload, type=KvEvents)


async def follow(stub: Any, *, blocks: bool, images: bool) -> AsyncGenerator[KvEvents, None]:
    """Yield the messages of one feed: those of the snapshot, then increments, whose numbers increase by one.

    Raises WorkerUnavailable if the feed is refused, ends, or loses a message. Then discard what it reported. *stub* is
    WorkerCredentials.calls().
    """
    call = stub.KvEvents(KvEventsRequest(blocks=blocks, images=images))
    last: KvEvents | None = None
    try:
        async for frame in call:
            message = _message_of(frame.payload)
            if not _follows(message, last):
                raise WorkerUnavailable("The worker's feed of cache events has a gap.")
            last = message
            yield message
        raise WorkerUnavailable("The worker ended its feed of cache events.")
    except grpc.aio.AioRpcError as error:
        raise WorkerUnavailable(f"The worker's feed of cache events ended: {error.code().name}.") from error
    except UNREADABLE as error:
        raise WorkerUnavailable("The worker's feed of cache events is not of this version of the wire.") from error
    finally:
        call.cancel()


def _follows(message: KvEvents, last: KvEvents | None) -> bool:
    if last is None:
        return message.snapshot
    if last.snapshot and not last.last:
        return message.snapshot and message.number == last.number
    return not message.snapshot and message.number == last.number + 1


MAX_HELD_IMAGES = 1 << 18
"""Images of one worker, about 80 MiB; more than any encoder cache has room for."""


class HeldImages:
    """The images, as (salt, content_hash), that a worker reports. Empty while there is no feed.

    If there are more than MAX_HELD_IMAGES, the oldest are forgotten, and their pixels are sent again.
    """

    def __init__(self) -> None:
        self._images: dict[tuple[bytes, bytes], None] = {}

    def __contains__(self, image: tuple[bytes, bytes]) -> bool:
        return image in self._images

    def take(self, message: KvEvents) -> None:
        """Apply one message of the feed."""
        for event in message.events:
            match event:
                case ImageStored(salt, content_hash):
                    self._images[salt, content_hash] = None
                    if len(self._images) > MAX_HELD_IMAGES:
                        del self._images[next(iter(self._images))]
                case ImageRemoved(salt, content_hash):
                    self._images.pop((salt, content_hash), None)

    async def keep_up(self, stub: Any) -> None:
        """Follow the feed until cancelled. If it is lost, forget everything and open another."""
        backoff = Backoff(first_seconds=0.05, limit_seconds=10.0, healthy_seconds=5.0)
        while True:
            backoff.started()
            try:
                async with contextlib.aclosing(follow(stub, blocks=False, images=True)) as feed:
                    async for message in feed:
                        self.take(message)
            except WorkerUnavailable as error:
                logger.debug("%s", error.message)
            finally:
                self._images.clear()
            await asyncio.sleep(backoff.after_failure())

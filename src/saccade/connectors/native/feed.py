"""Reads the feed of a worker's cache events: messages in order and without gaps, or an error."""

from collections.abc import AsyncGenerator
from typing import Any

import grpc
import msgspec

from saccade.errors import WorkerUnavailable
from saccade.protocol.kv_events import KvEvents
from saccade.transport.framing import UNREADABLE
from saccade.transport.message_pack import num_items
from saccade.transport.proto.worker_pb2 import KvEventsRequest

MAX_EVENTS = 4096
"""Of a message, whose bytes are those of saccade.transport.wire."""


class _Whole(msgspec.Struct, array_like=True):
    """A KvEvents that is not decoded yet."""

    number: msgspec.Raw
    events: msgspec.Raw


def _message_of(payload: bytes) -> KvEvents:
    """Return the message in *payload*. Raises UNREADABLE, including for too many events."""
    if num_items(memoryview(msgspec.msgpack.decode(payload, type=_Whole).events)) > MAX_EVENTS:
        raise msgspec.ValidationError("a message has too many events")
    return msgspec.msgpack.decode(payload, type=KvEvents)


async def follow(stub: Any, *, blocks: bool) -> AsyncGenerator[KvEvents, None]:
    """Yield the messages of one feed: those of the snapshot, then increments, whose numbers increase by one.

    It reports images, and blocks if *blocks* is true.

    Raises WorkerUnavailable if the feed is refused, ends, or loses a message. Then discard what it reported. *stub* is
    WorkerCredentials.calls().
    """
    call = stub.KvEvents(KvEventsRequest(blocks=blocks, images=True))
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

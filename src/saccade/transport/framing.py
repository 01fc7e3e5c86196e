"""Frames on a byte stream: a little-endian u32 length, then so many bytes."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import cast

import msgspec

PREFIX_BYTES = 4

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises of bytes that are no message. Text that is not UTF-8 and deep nesting are no DecodeError."""


class ChannelClosed(Exception):
    """The other end is gone, or says what is no frame."""


def framed(payload: bytes) -> bytes:
    """Return *payload* as a frame."""
    return len(payload).to_bytes(PREFIX_BYTES, "little") + payload


def take_payloads(buffer: bytearray, limit: int) -> Iterator[bytes]:
    """Remove whole frames from *buffer* and yield their payloads. Raises ChannelClosed at one of more than *limit*."""
    start = 0
    try:
        while len(buffer) - start >= PREFIX_BYTES:
            length = int.from_bytes(buffer[start : start + PREFIX_BYTES], "little")
            if length > limit:
                raise ChannelClosed
            end = start + PREFIX_BYTES + length
            if len(buffer) < end:
                break
            payload = memoryview(buffer)[start + PREFIX_BYTES : end].tobytes()
            start = end
            yield payload
    finally:
        del buffer[:start]


class Frames(asyncio.Protocol):
    """An end of a stream that hands each frame's payload on from within the read that completed it.

    No task stands between: each would have to be scheduled first, for every step of the engine. After a frame of more
    than *limit* bytes, or one at which *on_payload* raises UNREADABLE, none is taken: answers would have a gap.
    """

    def __init__(self, on_payload: Callable[[bytes], None], limit: int) -> None:
        self._on_payload = on_payload
        self._limit = limit
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Hand on what has become whole, until somebody closes."""
        if self._ended.done():
            return
        try:
            for payload in self._payloads(data):
                if self._transport is None or self._transport.is_closing():
                    break
                self._on_payload(payload)
        except ChannelClosed:
            self.abort()
        except UNREADABLE as error:
            self._ended.set_exception(error)

    def _payloads(self, data: bytes) -> Iterable[bytes]:
        """Return the payloads that *data* completes."""
        length = int.from_bytes(data[:PREFIX_BYTES], "little")
        if not self._buffer and PREFIX_BYTES + length == len(data) and length <= self._limit:
            # So a step's frames come, whole and alone.
            return (data[PREFIX_BYTES:],)
        self._buffer += data
        return take_payloads(self._buffer, self._limit)

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        if not self._ended.done():
            self._ended.set_result(None)

    async def ended(self) -> None:
        """Wait until nothing more will come. Raises what a frame that could not be read did."""
        await self._ended

    def send(self, payload: bytes) -> None:
        """Queue one frame; nothing is awaited, so frames keep their order. Nobody gets it once the stream has ended."""
        # uvloop raises where asyncio only logs.
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(framed(payload))

    def close(self) -> None:
        """End the stream after what is queued."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End the stream at once."""
        if self._transport is not None:
            self._transport.abort()

"""Frames on a byte stream. Each is a little-endian u32 length, followed by that many bytes."""

import asyncio
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from typing import cast

import msgspec

from saccade.transport import arrivals

PREFIX_BYTES = 4

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are no message. DecodeError does not cover invalid UTF-8 and deep nesting."""


class ChannelClosed(Exception):
    """The other end is gone, or has sent a frame that exceeds the limit."""


def prefix(payload: bytes) -> bytes:
    """Return the length prefix of *payload*'s frame."""
    return len(payload).to_bytes(PREFIX_BYTES, "little")


def length(prefix: bytes | bytearray) -> int:
    """Return how many bytes follow *prefix*."""
    return int.from_bytes(prefix, "little")


def framed(payload: bytes) -> bytes:
    return prefix(payload) + payload


def receive(connection: socket.socket, num_bytes: int) -> bytearray:
    """Return *num_bytes* from a blocking socket, or fewer if the other end is gone."""
    data = bytearray(num_bytes)
    view, received = memoryview(data), 0
    while received < num_bytes:
        count = connection.recv_into(view[received:])
        if count == 0:
            return data[:received]
        received += count
    return data


def take_payloads(buffer: bytearray, limit: int) -> Iterator[bytes]:
    """Remove whole frames from *buffer* and yield their payloads. Raises ChannelClosed if one exceeds *limit* bytes."""
    start = 0
    try:
        while len(buffer) - start >= PREFIX_BYTES:
            num_bytes = length(buffer[start : start + PREFIX_BYTES])
            if num_bytes > limit:
                raise ChannelClosed
            end = start + PREFIX_BYTES + num_bytes
            if len(buffer) < end:
                break
            payload = memoryview(buffer)[start + PREFIX_BYTES : end].tobytes()
            start = end
            yield payload
    finally:
        del buffer[:start]


class Frames(asyncio.Protocol):
    """One end of a stream, which calls *on_payload* as part of the read that completes a frame.

    No task is in between, since it would have to be scheduled for every step of the engine. If the frames of one read
    take longer than arrivals.TURN_SECONDS, reading pauses, and other tasks run before the rest are taken. No frame is
    taken after one that exceeds limit() bytes or for which *on_payload* raises UNREADABLE. Otherwise answers would have
    gaps.
    """

    def __init__(self, on_payload: Callable[[bytes], None], limit: Callable[[], int]) -> None:
        self._on_payload = on_payload
        self._limit = limit
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self.num_received = 0
        """Reads so far."""

    @property
    def num_unsent_bytes(self) -> int:
        """Number of bytes that wait here because the other end does not read."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Call on_payload for every complete frame, until the stream is closed."""
        self.num_received += 1
        self._hand_over(self._payloads(data))

    def _hand_over(self, payloads: Iterable[bytes]) -> None:
        deadline = time.monotonic() + arrivals.TURN_SECONDS
        if self._ended.done():
            return
        try:
            for payload in payloads:
                if self._transport is None or self._transport.is_closing():
                    break
                self._on_payload(payload)
                if time.monotonic() > deadline:
                    self._wait_for_a_turn(self._transport)
                    break
        except ChannelClosed:
            self.abort()
        except UNREADABLE as error:
            # Its traceback has the frame, and would keep it until cycles are collected.
            self._ended.set_exception(error.with_traceback(None))

    def _wait_for_a_turn(self, transport: asyncio.Transport) -> None:
        if self._buffer and not transport.is_closing():
            transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._take_turn, transport)

    def _take_turn(self, transport: asyncio.Transport) -> None:
        if not transport.is_closing():
            transport.resume_reading()
            self._hand_over(take_payloads(self._buffer, self._limit()))

    def _payloads(self, data: bytes) -> Iterable[bytes]:
        num_bytes = length(data[:PREFIX_BYTES])
        if not self._buffer and PREFIX_BYTES + num_bytes == len(data) and num_bytes <= self._limit():
            # The usual case: the frame of a step arrives alone and complete.
            return (data[PREFIX_BYTES:],)
        self._buffer += data
        return take_payloads(self._buffer, self._limit())

    def connection_lost(self, exc: Exception | None) -> None:
        """Let ended() return."""
        if not self._ended.done():
            self._ended.set_result(None)

    async def ended(self) -> None:
        """Wait until the stream has ended. Raises the UNREADABLE error of a frame that could not be decoded."""
        await self._ended

    def send(self, payload: bytes) -> None:
        """Queue one frame without an await, so that frames keep their order. It is dropped if the stream has ended."""
        # uvloop raises an error; asyncio only logs one.
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(framed(payload))

    def close(self) -> None:
        """End the stream after the queued frames."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End the stream at once."""
        if self._transport is not None:
            self._transport.abort()

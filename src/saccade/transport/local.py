"""The framed queue between a worker's front and its engine: one message a step, each way.

A Unix stream socket pair; a frame is a little-endian u32 length and one msgpack struct of saccade.protocol.local.
The engine's end blocks with a time limit; the front's end is asyncio.
"""

import asyncio
import select
import socket

import msgspec

from saccade.protocol.local import EngineMessage, FrontMessage

PREFIX_BYTES = 4
MAX_FRAME_BYTES = 1 << 30
RECEIVE_BYTES = 1 << 20


class ChannelClosed(Exception):
    """The other end is gone."""


def _frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(PREFIX_BYTES, "little") + payload


class EngineChannel:
    """The engine's end."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = bytearray()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FrontMessage] = msgspec.msgpack.Decoder(FrontMessage)

    def send(self, message: EngineMessage) -> None:
        """Send one message; blocks while the front is behind. Raises ChannelClosed."""
        try:
            self._socket.sendall(_frame(self._encoder.encode(message)))
        except OSError as error:
            raise ChannelClosed from error

    def receive(self, timeout: float) -> list[FrontMessage]:
        """Return all messages that have arrived, in order, waiting up to *timeout* seconds for the first.

        Raises ChannelClosed when the front is gone.
        """
        messages = self._take()
        while not messages and select.select([self._socket], [], [], timeout)[0]:
            self._fill()
            messages = self._take()
        while select.select([self._socket], [], [], 0)[0]:
            self._fill()
            messages += self._take()
        return messages

    def _fill(self) -> None:
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except OSError as error:
            raise ChannelClosed from error
        if not data:
            raise ChannelClosed
        self._buffer += data

    def _take(self) -> list[FrontMessage]:
        messages: list[FrontMessage] = []
        start = 0
        while len(self._buffer) - start >= PREFIX_BYTES:
            length = int.from_bytes(self._buffer[start : start + PREFIX_BYTES], "little")
            end = start + PREFIX_BYTES + length
            if len(self._buffer) < end:
                break
            messages.append(self._decoder.decode(memoryview(self._buffer)[start + PREFIX_BYTES : end].tobytes()))
            start = end
        del self._buffer[:start]
        return messages


class FrontChannel:
    """The front's end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[EngineMessage] = msgspec.msgpack.Decoder(EngineMessage)

    @classmethod
    async def open(cls, connection: socket.socket) -> "FrontChannel":
        """Wrap the front's end of a socket pair."""
        connection.setblocking(False)
        return cls(*await asyncio.open_connection(sock=connection, limit=RECEIVE_BYTES))

    def send(self, message: FrontMessage) -> None:
        """Queue one message; nothing is awaited, so commands keep their order."""
        self._writer.write(_frame(self._encoder.encode(message)))

    async def receive(self) -> EngineMessage:
        """Return the next message. Raises ChannelClosed when the engine is gone."""
        try:
            prefix = await self._reader.readexactly(PREFIX_BYTES)
            length = int.from_bytes(prefix, "little")
            if length > MAX_FRAME_BYTES:
                raise ChannelClosed
            return self._decoder.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError) as error:
            raise ChannelClosed from error

    def close(self) -> None:
        """Close the front's end; the engine sees ChannelClosed."""
        self._writer.close()

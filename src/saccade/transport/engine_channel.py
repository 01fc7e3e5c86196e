"""The message queue between a worker's front and its engine.

It is a pair of Unix stream sockets. A frame's payload is one msgpack struct of saccade.protocol.engine_ipc. The
engine's end blocks; the front's end uses asyncio.
"""

import asyncio
import select
import socket
from collections.abc import Callable, Sequence

import msgspec

from saccade.protocol.engine_ipc import EngineMessage, FrontMessage
from saccade.transport import framing
from saccade.transport.framing import ChannelClosed

MAX_FRAME_BYTES = 1 << 30
RECEIVE_BYTES = 1 << 20


class EngineChannel:
    """The engine's end of the queue."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = bytearray()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FrontMessage] = msgspec.msgpack.Decoder(FrontMessage)

    def send(self, message: EngineMessage) -> None:
        """Send one message, and block while the front does not read. Raises ChannelClosed."""
        try:
            self._socket.sendall(framing.framed(self._encoder.encode(message)))
        except OSError as error:
            raise ChannelClosed from error

    def receive(self, timeout: float, wake_fds: Sequence[int] = ()) -> list[FrontMessage]:
        """Return all messages that have arrived, in order; wait up to *timeout* seconds if there are none.

        The wait ends early if one of *wake_fds* becomes readable. Raises ChannelClosed if the front is gone.
        """
        messages: list[FrontMessage] = []
        descriptor = self._socket.fileno()
        while descriptor in select.select([descriptor, *wake_fds], [], [], 0 if messages else timeout)[0]:
            self._fill()
            payloads = framing.take_payloads(self._buffer, MAX_FRAME_BYTES)
            messages += [self._decoder.decode(payload) for payload in payloads]
        return messages

    def _fill(self) -> None:
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except OSError as error:
            raise ChannelClosed from error
        if not data:
            raise ChannelClosed
        self._buffer += data


class FrontChannel:
    """The front's end of the queue. Once it is open, it calls *on_message* with each of the engine's messages."""

    def __init__(self, on_message: Callable[[EngineMessage], None]) -> None:
        decoder: msgspec.msgpack.Decoder[EngineMessage] = msgspec.msgpack.Decoder(EngineMessage)
        self._frames = framing.Frames(lambda payload: on_message(decoder.decode(payload)), lambda: MAX_FRAME_BYTES)
        self._encoder = msgspec.msgpack.Encoder()

    async def open(self, connection: socket.socket) -> None:
        """Use *connection*, the front's end of a socket pair."""
        connection.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: self._frames, sock=connection)

    def send(self, message: FrontMessage) -> None:
        """Queue one message without an await, so that commands keep their order."""
        self._frames.send(self._encoder.encode(message))

    async def ended(self) -> None:
        """Wait until the engine is gone. Raises UNREADABLE if it sent a message that cannot be decoded."""
        await self._frames.ended()

    def close(self) -> None:
        """Close the front's end; the engine sees ChannelClosed."""
        self._frames.close()

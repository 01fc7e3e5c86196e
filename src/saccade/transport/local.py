"""The framed queue between a worker's front and its engine: one message a step, each way.

A Unix stream socket pair; a frame's payload is one msgpack struct of saccade.protocol.local. The engine's end blocks
with a time limit; the front's end is asyncio. Frames for streams that the front has lent go past it.
"""

import asyncio
import select
import socket
from collections.abc import Callable

import msgspec

from saccade.protocol.local import EngineMessage, EngineStep, FrontMessage, Hangup, Reply
from saccade.transport import framing
from saccade.transport.framing import ChannelClosed
from saccade.transport.handover import Lender, LentStreams

MAX_FRAME_BYTES = 1 << 30
RECEIVE_BYTES = 1 << 20


class EngineChannel:
    """The engine's end."""

    def __init__(self, connection: socket.socket) -> None:
        """Wait for the front to open its end. Raises ChannelClosed where there is none."""
        self._socket = connection
        self._buffer = bytearray()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FrontMessage] = msgspec.msgpack.Decoder(FrontMessage)
        try:
            self._streams = LentStreams(connection)
        except OSError as error:
            raise ChannelClosed from error

    def send(self, message: EngineMessage) -> None:
        """Send one message; blocks while the front is behind. Raises ChannelClosed."""
        try:
            self._socket.sendall(framing.framed(self._encoder.encode(message)))
        except OSError as error:
            raise ChannelClosed from error

    def step(self, step: EngineStep) -> None:
        """Send frames to the streams that were lent, and the front what is left. Raises ChannelClosed."""
        frames = [(number, frame) for number, frame in step.frames if not self._streams.send(number, frame)]
        if frames or step.load is not None:
            self.send(EngineStep(step.iteration, frames, step.load))

    def receive(self, timeout: float) -> list[FrontMessage]:
        """Return all messages that have arrived, in order; wait up to *timeout* seconds where there is none.

        Raises ChannelClosed when the front is gone.
        """
        front = self._socket.fileno()
        ready, writable, _ = select.select([front, self._streams.fileno()], self._streams.waiting(), [], timeout)
        if writable:
            self._streams.flush()
        if not ready:
            return []
        messages: list[FrontMessage] = []
        while front in ready:
            self._fill()
            messages += self._take()
            ready = select.select([front], [], [], 0)[0]
        # After the messages: the hangup of a stream must not be read before the stream.
        self._streams.take()
        return [message for message in messages if not self._done(message)]

    def _done(self, message: FrontMessage) -> bool:
        """Do what a message asks of the streams; return whether that was all."""
        if isinstance(message, Hangup):
            self._streams.drop(message.connection)
        elif isinstance(message, Reply):
            self._streams.send(message.connection, message.frame)
            return True
        return False

    def _fill(self) -> None:
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except OSError as error:
            raise ChannelClosed from error
        if not data:
            raise ChannelClosed
        self._buffer += data

    def _take(self) -> list[FrontMessage]:
        return [self._decoder.decode(payload) for payload in framing.take_payloads(self._buffer, MAX_FRAME_BYTES)]


class FrontChannel:
    """The front's end: *on_message* is called with each message of the engine's once it is open."""

    def __init__(self, on_message: Callable[[EngineMessage], None]) -> None:
        decoder: msgspec.msgpack.Decoder[EngineMessage] = msgspec.msgpack.Decoder(EngineMessage)
        self._frames = framing.Frames(lambda payload: on_message(decoder.decode(payload)), MAX_FRAME_BYTES)
        self._encoder = msgspec.msgpack.Encoder()
        self._lender: Lender | None = None

    async def open(self, connection: socket.socket) -> None:
        """Speak over *connection*, the front's end of a socket pair."""
        self._lender = Lender(connection)
        connection.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: self._frames, sock=connection)

    def send(self, message: FrontMessage) -> None:
        """Queue one message; nothing is awaited, so commands keep their order."""
        self._frames.send(self._encoder.encode(message))

    def lend(self, number: int, descriptor: int) -> None:
        """Have the engine write to a gateway's stream by itself. Raises OSError where it can take none."""
        if self._lender is not None:
            self._lender.lend(number, descriptor)

    async def ended(self) -> None:
        """Wait until the engine is gone. Raises UNREADABLE where it said what no engine of this version says."""
        await self._frames.ended()

    def close(self) -> None:
        """Close the front's end; the engine sees ChannelClosed."""
        self._frames.close()
        if self._lender is not None:
            self._lender.close()

"""What stands on a worker's side of the wire: connections to gateways, and the Front that they belong to."""

import asyncio
from typing import Protocol

import grpc

MAX_WAITING_FRAMES = 4096
"""Who is this many frames behind has stopped reading; the stream is ended, so that memory stays bounded."""


class Refused(Exception):
    """Why a call cannot be served, as a gRPC status and a sentence."""

    def __init__(self, status: grpc.StatusCode, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence


class Sink(Protocol):
    """What takes frames at once, and says itself when it cannot."""

    def send(self, payload: bytes) -> None:
        """Take one frame."""

    def close(self) -> None:
        """End after what was taken."""


class Connection:
    """One stream to a gateway, or to who watches the caches.

    Frames go to its sink, or wait here until they are asked for with next(), as gRPC does.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._sink: Sink | None = None
        self._frames: asyncio.Queue[bytes | Refused | None] = asyncio.Queue()
        self._ended = False

    def attach(self, sink: Sink) -> None:
        """Have frames go to *sink* from now on."""
        self._sink = sink

    def send(self, frame: bytes) -> None:
        """Send one encoded StepFrame or KvEvents."""
        if self._frames.qsize() >= MAX_WAITING_FRAMES:
            self.end(Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "This stream is not read."))
        if self._ended:
            return
        if self._sink is not None:
            self._sink.send(frame)
        else:
            self._frames.put_nowait(frame)

    def end(self, reason: Refused | None = None) -> None:
        """End the stream after what was sent: well, or with *reason*, which only next() can tell."""
        if self._ended:
            return
        self._ended = True
        if self._sink is not None:
            self._sink.close()
        else:
            self._frames.put_nowait(reason)

    async def next(self) -> bytes | None:
        """Return the next frame, None at the end. Raises Refused."""
        frame = await self._frames.get()
        if isinstance(frame, Refused):
            raise frame
        return frame


class Front(Protocol):
    """What stands behind the wire. Nothing here blocks or awaits."""

    def describe(self) -> bytes:
        """Return the encoded Description. Raises Refused while there is none."""

    def open(self) -> Connection:
        """Return a new connection. Raises Refused while no engine is ready."""

    def receive(self, connection: Connection, command: bytes) -> None:
        """Take one encoded GatewayCommand that came over *connection*. Raises Refused where it is malformed."""

    def watch(self, blocks: bool, pictures: bool) -> Connection:
        """Return a connection on which KvEvents of these caches come. Raises Refused while no engine is ready."""

    def lend(self, connection: Connection, descriptor: int) -> None:
        """Have whoever makes the frames of *connection* write them to a stream. Raises OSError where none is taken."""

    def reply(self, connection: Connection, frame: bytes) -> None:
        """Have a frame written to a stream that was lent."""

    def hang_up(self, connection: Connection) -> None:
        """Note that the stream of a connection has ended, in whatever way."""

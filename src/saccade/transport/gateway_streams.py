"""The worker's end of its streams to gateways: the front's view of each, and the streams over a Unix socket.

saccade.transport.server serves the streams over gRPC. If gRPC listens on a Unix socket, a gateway opens its stream at
another one next to it, with the same frames (docs/decisions/010-unix-stream.md). Either side ends a stream by closing
it.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import grpc

from saccade.transport import private_sockets
from saccade.transport.access import OWNER_ONLY, Access
from saccade.transport.framing import Frames
from saccade.transport.wire import MAX_MESSAGE_BYTES, TAKEN

MAX_WAITING_FRAMES = 4096
"""A gRPC stream ends if its gateway is this many frames behind, so that memory stays bounded."""

MAX_UNSENT_BYTES = 64 << 20
"""A stream over a Unix socket ends if its gateway is this many bytes behind, so that memory stays bounded."""

logger = logging.getLogger(__name__)


class Refused(Exception):
    """A call cannot be served; the reason is a gRPC status and a sentence."""

    def __init__(self, status: grpc.StatusCode, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence


class GatewayStream:
    """One stream to a gateway, or to a reader of cache events.

    With *frames*, send() writes to them at once. Without *frames*, sent frames wait here until next() takes them, as
    gRPC requires.
    """

    def __init__(self, number: int, frames: Frames | None = None) -> None:
        self.number = number
        self._frames = frames
        self._waiting: asyncio.Queue[bytes | Refused | None] = asyncio.Queue()
        self._ended = False

    def send(self, frame: bytes) -> None:
        """Send one encoded StepFrame or KvEvents."""
        if self._is_behind():
            self.end(Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "This stream is not read."))
        if self._ended:
            return
        if self._frames is not None:
            self._frames.send(frame)
        else:
            self._waiting.put_nowait(frame)

    def _is_behind(self) -> bool:
        if self._frames is None:
            return self._waiting.qsize() >= MAX_WAITING_FRAMES
        return self._frames.num_unsent_bytes > MAX_UNSENT_BYTES

    def end(self, reason: Refused | None = None) -> None:
        """End the stream after the frames that were sent, or at once if a Unix socket's gateway reads too slowly.

        next() raises *reason*, which a Unix socket cannot carry.
        """
        if self._ended:
            return
        self._ended = True
        if self._frames is None:
            self._waiting.put_nowait(reason)
        elif self._is_behind():
            self._frames.abort()
        else:
            self._frames.close()

    async def next(self) -> bytes | None:
        """Return the next frame, or None at the end. Raises Refused if the stream was ended with a reason."""
        frame = await self._waiting.get()
        if isinstance(frame, Refused):
            raise frame
        return frame


class Front(Protocol):
    """Answers gateways' calls; implemented by saccade.worker.service.Relay. No method blocks or awaits."""

    def describe(self, *, without_files: bool = False) -> bytes:
        """Return the encoded Description, with a digest if *without_files*. Raises Refused while no engine is ready."""

    def open(self, frames: Frames | None = None) -> GatewayStream:
        """Return a new connection, which writes to any *frames*. Raises Refused while no engine is ready."""

    def receive(self, connection: GatewayStream, command: bytes) -> None:
        """Take one encoded GatewayCommand from *connection*. Raises Refused if it is malformed."""

    def watch(self, blocks: bool, images: bool) -> GatewayStream:
        """Return a connection for KvEvents of *blocks*, *images* or both. Raises Refused while no engine is ready."""

    def hang_up(self, connection: GatewayStream) -> None:
        """Note that a connection's stream has ended."""


class _UnixStream(Frames):
    """One stream over a Unix socket."""

    def __init__(self, front: Front, opened: set["_UnixStream"], admits: Callable[[int], bool]) -> None:
        super().__init__(self._receive, lambda: MAX_MESSAGE_BYTES)
        self._front = front
        self._opened = opened
        self._admits = admits
        self._connection: GatewayStream | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close the stream unless its user is admitted and the front accepts it."""
        super().connection_made(transport)
        self._opened.add(self)
        try:
            if not self._admits(private_sockets.peer_uid(transport.get_extra_info("socket"))):
                self.abort()
                return
            self._connection = self._front.open(self)
        except (Refused, OSError):
            self.close()
        else:
            self.send(TAKEN)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._opened.discard(self)
        if self._connection is not None:
            self._front.hang_up(self._connection)

    def _receive(self, command: bytes) -> None:
        if self._connection is not None:
            try:
                self._front.receive(self._connection, command)
            except Refused as refused:
                self._connection.end(refused)


class UnixStreams:
    """Accepts streams at the socket *path* from users that *access* admits, each as a connection of *front*.

    The kernel names each peer's user. If the user is not admitted, the stream is closed unread.
    """

    def __init__(self, front: Front, path: str, access: Access = OWNER_ONLY) -> None:
        self._front = front
        self._path = Path(path)
        self._access = access
        self._server: asyncio.Server | None = None
        self._opened: set[_UnixStream] = set()
        self._refused: set[int] = set()

    async def start(self) -> None:
        """Listen. Raises OSError if the path is not available, and StartupError if access cannot be granted."""
        with contextlib.suppress(FileNotFoundError):
            if self._path.is_socket():  # A worker that was killed left it.
                self._path.unlink()
        listener = private_sockets.bound(self._path, self._access.allowed_uids)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(
            lambda: _UnixStream(self._front, self._opened, self._admits), sock=listener
        )

    def _admits(self, uid: int) -> bool:
        admitted = self._access.admits(uid)
        if not admitted and uid not in self._refused:
            self._refused.add(uid)
            logger.warning("uid %d may not open a stream at %s: --allowed-uids would let it", uid, self._path)
        return admitted

    def stop(self) -> None:
        """Stop listening, and end the remaining streams."""
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)
        for stream in tuple(self._opened):
            stream.close()

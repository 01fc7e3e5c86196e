"""The worker's end of streams over a Unix socket, for gateways on its host: see saccade.transport.stream.

Frames carry what the messages of gRPC's stream do. Either side ends the stream by closing it. Commands are read here;
frames are written by the engine, to which the stream is lent: see saccade.transport.handover. The kernel says which
user has connected; a user that is not admitted is not heard.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

from saccade.transport import private_sockets
from saccade.transport.access import OWNER_ONLY, Access
from saccade.transport.connection import Connection, Front, Refused
from saccade.transport.framing import Frames
from saccade.transport.wire import MAX_MESSAGE_BYTES

logger = logging.getLogger(__name__)


class _Stream(Frames):
    """One stream; it is the sink of its connection's frames."""

    def __init__(self, front: Front, opened: set["_Stream"], admits: Callable[[int], bool]) -> None:
        super().__init__(self._receive, MAX_MESSAGE_BYTES)
        self._front = front
        self._opened = opened
        self._admits = admits
        self._connection: Connection | None = None
        self._socket: socket.socket | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Be taken by the front and lent to its engine, or closed."""
        super().connection_made(transport)
        self._opened.add(self)
        try:
            self._socket = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
            if not self._admits(private_sockets.peer_uid(self._socket)):
                self.abort()
                return
            self._connection = self._front.open()
            self._connection.attach(self)
            self._front.lend(self._connection, self._socket.fileno())
        except (Refused, OSError):
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """End, for the gateway too: the engine has the stream open still."""
        super().connection_lost(exc)
        self._opened.discard(self)
        if self._socket is not None:
            with self._socket, contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        if self._connection is not None:
            self._front.hang_up(self._connection)

    def send(self, payload: bytes) -> None:
        """Have a frame of the front's written."""
        if self._connection is not None:
            self._front.reply(self._connection, payload)

    def _receive(self, command: bytes) -> None:
        if self._connection is not None:
            try:
                self._front.receive(self._connection, command)
            except Refused as refused:
                self._connection.end(refused)


class UnixStreams:
    """Takes streams at the socket *path* from users that *access* admits, each a connection of *front*'s."""

    def __init__(self, front: Front, path: str, access: Access = OWNER_ONLY) -> None:
        self._front = front
        self._path = Path(path)
        self._access = access
        self._server: asyncio.Server | None = None
        self._opened: set[_Stream] = set()
        self._refused: set[int] = set()

    async def start(self) -> None:
        """Listen. Raises OSError where the path cannot be had, StartupError where the access cannot be granted."""
        with contextlib.suppress(FileNotFoundError):
            if self._path.is_socket():  # what a worker leaves that was killed
                self._path.unlink()
        listener = private_sockets.bound(self._path, self._access.allowed_uids)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(
            lambda: _Stream(self._front, self._opened, self._admits), sock=listener
        )

    def _admits(self, uid: int) -> bool:
        admitted = self._access.admits(uid)
        if not admitted and uid not in self._refused:
            self._refused.add(uid)
            logger.warning("uid %d may not open a stream at %s: --allowed-uids would let it", uid, self._path)
        return admitted

    def stop(self) -> None:
        """Stop listening and end what is left."""
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)
        for stream in tuple(self._opened):
            stream.close()

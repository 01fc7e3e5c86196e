"""The worker's end of streams over a Unix socket, for gateways on its host: see saccade.transport.stream.

Frames carry what the messages of gRPC's stream do. Either side ends the stream by closing it. Commands are read here;
frames are written by the engine, to which the stream is lent: see saccade.transport.handover.
"""

import asyncio
import contextlib
import os
import socket

from saccade.transport.connection import Connection, Front, Refused
from saccade.transport.framing import Frames
from saccade.transport.wire import MAX_MESSAGE_BYTES


class _Stream(Frames):
    """One stream; it is the sink of its connection's frames."""

    def __init__(self, front: Front, opened: set["_Stream"]) -> None:
        super().__init__(self._receive, MAX_MESSAGE_BYTES)
        self._front = front
        self._opened = opened
        self._connection: Connection | None = None
        self._socket: socket.socket | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Be taken by the front and lent to its engine, or closed."""
        super().connection_made(transport)
        self._opened.add(self)
        try:
            self._connection = self._front.open()
            self._connection.attach(self)
            self._socket = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
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
    """Takes streams at the socket *path*, each a connection of *front*'s."""

    def __init__(self, front: Front, path: str) -> None:
        self._front = front
        self._path = path
        self._server: asyncio.Server | None = None
        self._opened: set[_Stream] = set()

    async def start(self) -> None:
        """Listen. Raises OSError where the path cannot be had."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _Stream(self._front, self._opened), self._path)

    def stop(self) -> None:
        """Stop listening and end what is left."""
        if self._server is not None:
            self._server.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
        for stream in tuple(self._opened):
            stream.close()

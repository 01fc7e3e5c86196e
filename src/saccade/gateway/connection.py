"""One HTTP connection, bounded before any application sees it: how much it may send, how long it may be silent."""

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10
"""What a request may send besides its body: request line and headers, chunk extensions, trailers."""

FIRST_READ_BYTES = 16 << 10
READ_BYTES = 120 << 10
"""What is read from a connection at a time, at first and once somebody waits for the rest of a body. More would hold up
all others, and would be new memory from the system at every read.
"""

SILENCE_SECONDS = 30.0
"""How long a client that has begun a request, or nothing yet, may send no byte of it."""


class Connection(HttpToolsProtocol):
    """uvicorn's, ended where a head grows over MAX_HEAD_BYTES or a request stands still for SILENCE_SECONDS.

    uvicorn alone would keep any amount of headers, and for ever the place of a request whose body never comes.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._num_head_bytes = 0
        self._is_expecting = True
        self.has_begun_body = False
        self._heard_at = self.loop.time()
        self._watch: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._listen(SILENCE_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of the clock."""
        if self._watch is not None:
            self._watch.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what arrived; body and ends of requests set the count back meanwhile."""
        self._heard_at = self.loop.time()
        self._num_head_bytes += len(data)
        super().data_received(data)
        if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The request's head is over the limit of {MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        """Note that a request begins."""
        self._is_expecting = True
        self.has_begun_body = False
        if self._watch is None:
            self._listen(SILENCE_SECONDS)
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body; behind the first, nothing is read until the application asks for it."""
        self._num_head_bytes = 0
        super().on_body(body)
        if not self.has_begun_body and not self.cycle.response_complete:
            self.has_begun_body = True
            self.flow.pause_reading()

    def on_message_complete(self) -> None:
        """Note that the request is whole."""
        self._num_head_bytes = 0
        self._is_expecting = self.has_begun_body = False
        super().on_message_complete()

    def _listen(self, seconds: float) -> None:
        self._watch = self.loop.call_later(seconds, self._look)

    def _look(self) -> None:
        """Close where nothing came; a connection that is not read from may have sent all that it could."""
        self._watch = None
        if not self._is_expecting or self.transport.is_closing():
            return
        left = SILENCE_SECONDS if self.flow.read_paused else self._heard_at + SILENCE_SECONDS - self.loop.time()
        if left > 0:
            self._listen(left)
        else:
            self.transport.close()


class Connections:
    """Makes a server's connections; all of them read into one piece of memory, one after the other."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(READ_BYTES))

    def __call__(self, *arguments: Any, **settings: Any) -> asyncio.BufferedProtocol:
        """Return a connection as the event loop wants it; *arguments* and *settings* are uvicorn's."""
        return _Reader(Connection(*arguments, **settings), self._memory)


class _Reader(asyncio.BufferedProtocol):
    """Says where to read to, and hands everything on to a Connection."""

    def __init__(self, connection: Connection, memory: memoryview) -> None:
        self._connection = connection
        self._memory = memory
        self._data_received: Callable[[bytes], None] = connection.data_received
        for event in ("connection_made", "connection_lost", "eof_received", "pause_writing", "resume_writing"):
            setattr(self, event, getattr(connection, event))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._memory if self._connection.has_begun_body else self._memory[:FIRST_READ_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        self._data_received(bytes(self._memory[:nbytes]))

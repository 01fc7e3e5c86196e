"""Whole responses and server-sent events over raw ASGI, without a framework's response class."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Self

import structlog
from starlette.types import Send

from saccade.errors import InternalError, QueueFull, SaccadeError
from saccade.gateway.json_parts import Part, joined, num_bytes, num_held_bytes
from saccade.gateway.reservation import Reservation
from saccade.gateway.server.answer_memory import PIECE_BYTES
from saccade.gateway.server.connection import Connection
from saccade.gateway.server.errors import UNFORESEEN, drop_tracebacks, json_head
from saccade.transport import lasting_task

EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
PING = b": ping\n\n"

BACKLOG_BYTES = 4 << 20
"""Bytes that may wait for the client before generation waits, too; less if memory is short."""

_logger = structlog.get_logger(__name__)


NO_ROOM = (
    "The answer takes more memory than is left for it: ask for less of it or for fewer log probabilities, stream it, "
    "or try again shortly."
)


class WholeResponse:
    """A response that is sent when it is complete.

    *memory* counts the response, and what its writers keep until then. If memory runs out while a response grows beyond
    one piece, the response ends with QueueFull.
    """

    def __init__(self, send: Send, memory: Reservation) -> None:
        self._send = send
        self._memory = memory

    def write_events(self, events: bytes, num_kept_bytes: int) -> bool:
        """Count *num_kept_bytes* more of the answer, which has no *events*. Return whether there is room for more."""
        self._memory.count(num_kept_bytes)
        return not self._is_over

    async def flush(self) -> None:
        """Raise QueueFull unless there is now room for more of the answer."""
        if self._is_over:
            raise QueueFull(NO_ROOM)

    async def end_response(self, parts: Sequence[Part]) -> None:
        """Send the whole response as JSON."""
        self._memory.count(num_held_bytes(parts) - self._memory.num_bytes)
        num_left = num_bytes(parts)
        await self._send(json_head(200, num_left))
        for piece in joined(parts, PIECE_BYTES):
            num_left -= len(piece)
            await self._send({"type": "http.response.body", "body": piece, "more_body": num_left > 0})

    @property
    def _is_over(self) -> bool:
        return self._memory.num_bytes > PIECE_BYTES and self._memory.is_over


class EventStream:
    """A response made of events. The headers wait for the first event, so that an earlier error has its own status.

    A stream is in one of three states:

    1. Before the headers: events wait in a backlog, and a task sends them with the headers through *send*.
    2. Direct: events go straight to *connection*.
    3. Backlog: the client reads too slowly. Events wait, and a task sends them through *send*; then the stream is
       direct again.

    *memory* counts the backlog, and what the writers keep. The last event goes through *send*. As a context manager, it
    sends nothing after the block. If an error ends the block after the first event, *failure* turns it into the last
    event; otherwise it is raised.
    """

    def __init__(
        self,
        send: Send,
        connection: Connection,
        ping_interval_seconds: float,
        memory: Reservation,
        failure: Callable[[SaccadeError], bytes],
    ) -> None:
        self._send = send
        self._ping_interval_seconds = ping_interval_seconds
        self._connection = connection
        self._memory = memory
        self._failure = failure
        self._last = time.monotonic()
        self._backlog = bytearray()
        self._num_kept_bytes = 0
        self._more = True
        self._sending: asyncio.Task[None] | None = None
        self._has_sent_headers = False
        self.started = False

    async def __aenter__(self) -> Self:
        self._connection.on_sweep = self._ping
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        try:
            if not isinstance(error, Exception) or not self.started:
                return False
            # It is too late for the middleware to answer with a status.
            failure = error if isinstance(error, SaccadeError) else InternalError(UNFORESEEN)
            if failure is not error:
                _logger.exception("unforeseen error in a stream")
            drop_tracebacks(error)
            await self.end_response([self._failure(failure)])
            return True
        finally:
            self._connection.on_sweep = None
            await lasting_task.end(self._sending)

    def write_events(self, events: bytes, num_kept_bytes: int = 0) -> bool:
        """Send *events* or keep them in the backlog, and count *num_kept_bytes* more that wait to become events.

        Return whether the backlog takes more.
        """
        if num_kept_bytes:
            self._num_kept_bytes += num_kept_bytes
            self._memory.count(num_kept_bytes)
        if not events:
            return True
        self._last = time.monotonic()
        self.started = True
        if self._sending is None:
            if self._has_sent_headers and self._more and self._connection.write_piece(events):
                return True
            self._sending = asyncio.create_task(self._send_backlog(), name="backlog of a stream")
        self._backlog += events
        self._memory.take_bytes(len(events))
        return len(self._backlog) <= BACKLOG_BYTES and not self._memory.is_over

    async def end_response(self, parts: Sequence[Part]) -> None:
        """Send the last events, and return when the connection has accepted all of them."""
        self._more = False
        self.write_events(b"".join(joined(parts, PIECE_BYTES)))
        await self.flush()

    async def flush(self) -> None:
        """Return when the connection has accepted all events."""
        if self._sending is not None:
            await asyncio.shield(self._sending)

    def _ping(self) -> None:
        """Send a comment after a silence, so that proxies keep the connection open."""
        is_silent = time.monotonic() - self._last >= self._ping_interval_seconds
        # A complete answer, or one that waits for its client, needs no comment.
        if is_silent and self._more and self._sending is None:
            self.write_events(PING)

    async def _send_backlog(self) -> None:
        try:
            while self._backlog:
                events = bytes(self._backlog)
                self._backlog.clear()
                await self._emit(events)
                self._memory.keep(len(self._backlog) + self._num_kept_bytes)
        finally:
            self._sending = None

    async def _emit(self, events: bytes) -> None:
        if not self._has_sent_headers:
            self._has_sent_headers = True
            await self._send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
        more = self._more or bool(self._backlog)
        await self._send({"type": "http.response.body", "body": events, "more_body": more})

"""Server-sent events over raw ASGI, without a framework's response class in between."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, Self

import structlog
from starlette.types import Send

from saccade.errors import InternalError, SaccadeError
from saccade.gateway.limits.byte_budget import Reservation
from saccade.gateway.server.connection import Connection
from saccade.gateway.server.middleware import UNFORESEEN, drop_tracebacks

EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
"""The last event of OpenAI's streams that did not fail."""

BACKLOG_BYTES = 4 << 20
"""Bytes that may wait for the client before generation waits, too; less where memory is short."""

_logger = structlog.get_logger(__name__)


def event(data: bytes) -> bytes:
    """Return *data* as a server-sent event without a name."""
    return b"data: " + data + b"\n\n"


def named_event(name: str, data: bytes) -> bytes:
    """Return *data* as a server-sent event."""
    return b"event: " + name.encode() + b"\n" + event(data)


class EventStream:
    """An answer in events. The headers wait for the first one, so that an error before it has its own HTTP status.

    The first event and the last go through *send*, the others straight to *connection*, which is None if the server is
    not ours. While the client reads too slowly, events wait in a backlog, which *memory* counts. So an answer can end
    before its client has read it. A context manager: after its end nothing is sent.
    """

    def __init__(
        self, send: Send, connection: Connection | None, ping_interval_seconds: float, memory: Reservation
    ) -> None:
        self._send = send
        self._ping_interval_seconds = ping_interval_seconds
        self._connection = connection
        self._memory = memory
        self._last = time.monotonic()
        self._backlog = bytearray()
        self._more = True
        self._sending: asyncio.Task[None] | None = None
        self._has_sent_headers = False
        self.started = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)

    async def write(self, event: bytes, more: bool = True) -> None:
        """Send *event*, now or from the backlog; the first one sends the headers too."""
        self._last = time.monotonic()
        self.started = True
        self._more = more
        connection = self._connection
        if self._sending is None:
            if connection is not None and more and self._has_sent_headers and connection.write_chunk(event):
                return
            if connection is None or connection.is_writable:
                await self._emit(event)
                return
        self._backlog += event
        self._memory.take(len(event))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_backlog(), name="backlog of a stream")
        if len(self._backlog) > BACKLOG_BYTES or self._memory.is_over:
            await self.flush()

    async def flush(self) -> None:
        """Return when the connection has accepted all events."""
        if self._sending is not None:
            await asyncio.shield(self._sending)

    async def keep_alive(self) -> NoReturn:
        """Send a comment after every silence, so that proxies keep the connection; runs until cancelled."""
        while True:
            silence = time.monotonic() - self._last
            if silence >= self._ping_interval_seconds:
                # An answer that is whole, or that waits for its client, needs no comment.
                if self._more and self._sending is None:
                    await self.write(PING)
                silence = 0.0
            await asyncio.sleep(self._ping_interval_seconds - silence)

    async def _send_backlog(self) -> None:
        try:
            while self._backlog:
                events = bytes(self._backlog)
                self._backlog.clear()
                await self._emit(events)
                self._memory.keep(len(self._backlog))
        finally:
            self._sending = None

    async def _emit(self, events: bytes) -> None:
        if not self._has_sent_headers:
            self._has_sent_headers = True
            await self._send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
        more = self._more or bool(self._backlog)
        await self._send({"type": "http.response.body", "body": events, "more_body": more})


async def report_errors(
    stream: EventStream, work: Coroutine[Any, Any, object], told: Callable[[SaccadeError], bytes]
) -> None:
    """Run *work*; an error after the stream began becomes its last one, as *told* has it. An earlier one is raised."""
    try:
        await work
    except Exception as error:
        # Once the stream began, the middleware can no longer answer with a status.
        if not stream.started:
            raise
        failure = error if isinstance(error, SaccadeError) else InternalError(UNFORESEEN)
        if failure is not error:
            _logger.exception("unforeseen error in a stream")
        drop_tracebacks(error)
        await stream.write(told(failure), more=False)

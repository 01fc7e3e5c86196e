"""Server-sent events over raw ASGI: no layer between a token and the socket."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import structlog
from starlette.types import Send

from saccade.errors import InternalError, SaccadeError
from saccade.gateway.border import UNFORESEEN, encode_error

EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
PING = b": ping\n\n"

_logger = structlog.get_logger(__name__)


class EventStream:
    """An answer in events. The headers wait for the first one, so that an error before it has its own HTTP status."""

    def __init__(self, send: Send, ping_interval_seconds: float) -> None:
        self._send = send
        self._ping_interval_seconds = ping_interval_seconds
        self._last = time.monotonic()
        self.started = False

    async def write(self, event: bytes, more: bool = True) -> None:
        """Send *event* as it is; the first one sends the headers too."""
        self._last = time.monotonic()
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
        await self._send({"type": "http.response.body", "body": event, "more_body": more})

    async def keep_alive(self) -> None:
        """Send a comment after every silence, so that proxies keep the connection; for ever."""
        while True:
            silence = time.monotonic() - self._last
            if silence >= self._ping_interval_seconds:
                await self.write(PING)
                silence = 0.0
            await asyncio.sleep(self._ping_interval_seconds - silence)


async def report_errors(stream: EventStream, work: Coroutine[Any, Any, None]) -> None:
    """Run *work*; an error after the stream began becomes its last event, without [DONE]. An earlier one is raised."""
    try:
        await work
    except SaccadeError as error:
        failure = error
    except Exception:
        # The handler that answers with a status is out of reach once the stream began.
        if not stream.started:
            raise
        _logger.exception("unforeseen error in a stream")
        failure = InternalError(UNFORESEEN)
    else:
        return
    if not stream.started:
        raise failure
    await stream.write(b"data: " + encode_error(failure) + b"\n\n", more=False)

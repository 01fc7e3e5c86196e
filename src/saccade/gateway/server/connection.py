"""HTTP connections with limits that apply outside the application.

They limit the number of connections, the size and duration of a head, and the rate of a body. They also limit how long
a client may leave its answer unread.
"""

import asyncio
import contextlib
import contextvars
import fcntl
import select
import socket
import struct
import sys
import termios
from collections.abc import Callable
from typing import Any, Protocol, cast

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from saccade.errors import InvalidValue, QueueFull, RequestError, RequestTimeout
from saccade.gateway.config import ConnectionLimits
from saccade.gateway.server.answer_framing import AnswerTransport, framed, needs_framing, refusal
from saccade.gateway.server.errors import encode_error, send_json
from saccade.gateway.server.request_reader import MAX_HEAD_BYTES, RequestReader, body_length

CONNECTION = "saccade.connection"
"""Key of the ASGI scope for the request's Connection."""

FIRST_READ_BYTES = 16 << 10
READ_BYTES = 120 << 10
"""Bytes per read: FIRST_READ_BYTES at first and for chunked bodies, READ_BYTES once the application reads the rest of a
body of known length. More would delay other connections and allocate system memory at every read. In a chunked body a
large piece says nothing about the size of the next ones.
"""

SMALL_READ_BYTES = 4 << 10
SMALL_PIECE_BYTES = 256
"""A body of smaller pieces on average is read SMALL_READ_BYTES at a time: each piece takes microseconds."""

UNSENT_BYTES = 64 << 10
"""What a connection may hold of answers that its client does not read, and one piece more."""

TOO_SLOW = "The server has too many connections, and this one keeps it waiting; send the request again, faster."
TOO_MANY = "The server has too many connections; try again shortly."

TOO_MUCH_FRAMING = "The request has too many bytes besides its body: send larger chunks, and no trailers."


class Places(Protocol):
    """The accounting of all connections, as a single connection sees it."""

    limits: ConnectionLimits

    def takes(self, connection: "Connection", path: str) -> bool:
        """Return whether *connection* may ask for *path*."""

    def mark_authenticated(self, connection: "Connection", tenant: bytes) -> None:
        """Count *connection* towards *tenant*. Raises QueueFull if the tenant already has its share of connections."""


class Connection(HttpToolsProtocol):
    """uvicorn's connection with deadlines, and with one request at a time.

    uvicorn itself accepts headers of any size. It waits forever for a body that never arrives and for a client that
    never reads its answer.
    """

    def __init__(self, places: Places, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._places = places
        self._limits = places.limits
        self._reader = RequestReader(self)
        self._next = b""
        self._num_wire_bytes = 0
        self._num_pieces = 0
        self._has_small_pieces = False
        self._head_since: float | None = None
        self._idle_since: float | None = None
        self._expects_body = False
        self._has_begun_body = False
        self._is_chunked = False
        self._body_since: float | None = None
        self._num_body_bytes = 0
        self._body_seconds = 0.0
        self._drained_since: float | None = None
        self._num_drained_bytes = 0
        self._is_last = False
        self._unread_since: float | None = None
        self._num_unread_bytes = 0
        self._is_lost = False
        self._on_lost: Callable[[], object] | None = None
        self.on_sweep: Callable[[], object] | None = None
        """Called every *sweep_seconds*."""

    @property
    def is_idle(self) -> bool:
        """Whether no request is in progress."""
        return not self._expects_body and (self.cycle is None or self.cycle.response_complete)

    @property
    def can_go(self) -> bool:
        """Whether the connection may end without loss: it is idle, or only discards the rest of a refused body."""
        return self.is_idle or (self.cycle is not None and self.cycle.response_complete)

    @property
    def num_read_bytes(self) -> int:
        """How many bytes the next read may take."""
        if self._has_small_pieces:
            return SMALL_READ_BYTES
        return READ_BYTES if self._has_begun_body and not self._is_chunked else FIRST_READ_BYTES

    def write_piece(self, content: bytes) -> bool:
        """Send *content* as the next piece of an unfinished answer, if its client reads fast enough.

        Return whether it was sent. ASGI's send() does the same, but goes through every middleware first.
        """
        if self.flow.write_paused or self.transport.is_closing():
            return False
        # A chunk (RFC 9112, 7.1), unless the client speaks HTTP/1.0.
        self.transport.write(b"%x\r\n%b\r\n" % (len(content), content) if self.cycle.chunked_encoding else content)
        return True

    def watch(self, on_lost: Callable[[], object] | None) -> None:
        """Call *on_lost* when the client leaves, or at once if it has left already; None ends the watch."""
        self._on_lost = on_lost
        if on_lost is None:
            return
        # After a body in large pieces reading is paused, and nothing would notice the end of the connection.
        self.flow.resume_reading()
        if self._is_lost:
            on_lost()

    def mark_authenticated(self, tenant: bytes) -> None:
        """Record that a request with a valid key of *tenant* came over this connection. Raises QueueFull."""
        try:
            self._places.mark_authenticated(self, tenant)
        except QueueFull:
            # The next request would find it open.
            self.cycle.keep_alive = False
            raise

    def bytes_per_second(self, now: float) -> float | None:
        """Return how fast the client makes progress: the rate of its body, or 0.0 if it does not read its answer.

        Return None if the server does not wait for the client, or has not waited for *waiting_seconds* yet. *now* is
        the event loop's time.
        """
        reads_body = self._expects_body and not self.flow.read_paused
        since = self._unread_since if self.flow.write_paused else self._body_since if reads_body else None
        if since is None or now - since <= self._limits.waiting_seconds:
            return None
        return 0.0 if self.flow.write_paused else self._num_body_bytes / (now - since)

    def make_room(self) -> None:
        """Refuse the request that keeps the server waiting, unless its answer has begun, and close the connection."""
        if self.cycle.response_started:
            self._reset()
            return
        self.transport.write(refusal(QueueFull(TOO_SLOW)))
        self.transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(UNSENT_BYTES)  # that of TLS is larger by default
        self._head_since = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop the request, which refers to its connection and holds the unread part of its body."""
        super().connection_lost(exc)
        self._is_lost = True
        if self._on_lost is not None:
            self._on_lost()
        self._next = b""
        self._reader = self.cycle = self.scope = None  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """Parse *data* up to the end of a request. Further bytes wait until the answer has been sent."""
        if self._is_last and not self._expects_body:
            self._drain(len(data))
            return
        self._num_pieces = 0
        try:
            self._next = self._parse(self._next + data if self._next else data)
        except RequestError as error:
            self._refuse(error)
            return
        self._has_small_pieces = self._num_pieces * SMALL_PIECE_BYTES > len(data)
        if len(self._next) >= FIRST_READ_BYTES:
            self.flow.pause_reading()

    def _parse(self, data: bytes) -> bytes:
        """Parse *data* while no request waits for its answer; return the rest. Raises RequestError."""
        while data := self._reader.skip_empty_lines(data):
            if self.transport.is_closing() or not (self._expects_body or (self.is_idle and not self._is_last)):
                break
            if not self._expects_body and self._head_since is None:
                self._head_since, self._idle_since = self.loop.time(), None
            num_bytes = len(data)
            data = self._reader.read_request(data)
            self._num_wire_bytes += num_bytes - len(data)
            if self._expects_body and self._num_wire_bytes > MAX_HEAD_BYTES + 2 * self._num_body_bytes:
                raise InvalidValue(TOO_MUCH_FRAMING)
        return data

    def _refuse(self, error: RequestError) -> None:
        """Answer with *error* unless the answer has begun, and read no further request."""
        if self._expects_body and self.cycle.response_complete:
            self._expects_body = False
            self._discard_the_rest()
            return
        if self._expects_body and self.cycle.response_started:
            self.transport.close()
            return
        self.transport.write(refusal(error))
        if self._expects_body:
            self._expects_body = False
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._discard_the_rest()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast(dict[str, Any], self.scope)[CONNECTION] = self

    def on_headers_complete(self) -> None:
        """Begin to wait for the body. If the answer ends before the body, the connection closes after a delay."""
        if self.parser.should_upgrade():
            return  # the reader gives the head to another parser
        version = self.parser.get_http_version()
        length = body_length(version, self.headers)
        self._reader.begin_body(length)
        self.expect_100_continue = self.expect_100_continue and version == "1.1"
        super().on_headers_complete()
        self._head_since = None
        self._expects_body = True
        self._has_begun_body = False
        self._body_since = self.loop.time()
        self._is_chunked = length is None
        self._num_wire_bytes = self._num_body_bytes = 0
        self._body_seconds = 0.0
        # The answer to HEAD has no body.
        holds_head = cast(dict[str, Any], self.scope)["method"] != "HEAD"
        self.cycle.transport = AnswerTransport(self.transport, self.linger, holds_head=holds_head)  # type: ignore[assignment]

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if not self._places.takes(self, cast(dict[str, Any], cycle.scope)["path"]):
            cycle.keep_alive, app = False, _refuse_request
        super()._start_asgi_task(cycle, cast(Any, framed(app, cycle)) if needs_framing(cycle) else app)

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body. After the first piece, reading pauses until the application receives."""
        self._num_pieces += 1
        self._num_body_bytes += len(body)
        super().on_body(body)
        if self.cycle.response_complete:
            self._drain(len(body))
        elif not self._has_begun_body:
            self._has_begun_body = True
            self.flow.pause_reading()

    def on_message_complete(self) -> None:
        """Begin to wait for the next request, if the answer was sent before the body ended."""
        if self.parser.should_upgrade():
            return
        self._reader.end_body()
        self._expects_body = self._has_begun_body = False
        self.flow.resume_reading()
        super().on_message_complete()
        if self._is_last:
            self._discard_the_rest()
        elif self.cycle.response_complete:
            self._drained_since = None
            self._num_drained_bytes = 0
            self._idle_since = self.loop.time()

    def on_response_complete(self) -> None:
        """Read what the client has sent after the request, or wait for more.

        This replaces uvicorn's timer and pipeline.
        """
        self.server_state.total_requests += 1
        if self.transport.is_closing() or self._is_last:
            return
        self.flow.resume_reading()
        if not self._expects_body:
            self._idle_since = self.loop.time()
            if self._next:
                # In the context of the request that has ended, the log would take this for a part of it.
                contextvars.Context().run(self.data_received, b"")

    def linger(self) -> None:
        """End the connection after the answer. If the body is still arriving, read a part of it first."""
        self._is_last = True
        if self._expects_body:
            self._drain(0)
        else:
            self._discard_the_rest()

    def _discard_the_rest(self) -> None:
        """Send nothing more, and discard input until the client ends the connection, too (RFC 9112, 9.6).

        Closing with unread bytes would reset the connection, and the client might miss its answer. TLS connections
        close in their own way.
        """
        self._is_last = True
        self._next = b""
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._drain(0)
        else:
            self.transport.close()

    def _drain(self, nbytes: int) -> None:
        """Count *nbytes* of a discarded body; close the connection if there are too many."""
        if self._drained_since is None:
            self._drained_since = self.loop.time()
            self.flow.resume_reading()
        self._num_drained_bytes += nbytes
        if self._num_drained_bytes > self._limits.drain_bytes:
            self.transport.close()

    def check_deadlines(self, now: float) -> None:
        """Close the connection if a deadline has passed; *now* is the event loop's time."""
        limits = self._limits
        if self._is_unread(now):
            self._reset()
        elif self.transport.is_closing():
            return
        elif (
            _is_over(self._head_since, limits.head_seconds, now)
            or _is_over(self._idle_since, limits.keep_alive_seconds, now)
            or _is_over(self._drained_since, limits.drain_seconds, now)
        ):
            self.transport.close()
        elif self.flow.read_paused and self._on_lost is not None and _has_left(self.transport):
            self.transport.abort()
        elif self._expects_body and self.cycle.response_complete:
            self._drain(0)
        elif self._expects_body and not self.flow.read_paused and not self.cycle.waiting_for_100_continue:
            self._check_body_rate()

    def _reset(self) -> None:
        """Reset the connection. After a normal close the kernel would keep unread bytes for minutes."""
        with contextlib.suppress(OSError):
            now = struct.pack("ii", 1, 0)
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, now)
        self.transport.abort()

    def _check_body_rate(self) -> None:
        """Refuse a body that arrives too slowly. Only the time during which the server reads counts."""
        limits = self._limits
        self._body_seconds += limits.sweep_seconds
        if self._body_seconds > limits.body_seconds:
            self._end_slow_body(f"The request's body did not arrive within {limits.body_seconds:g} seconds.")
        elif (
            self._body_seconds > limits.body_grace_seconds
            and self._num_body_bytes < limits.body_bytes_per_second * self._body_seconds
        ):
            self._end_slow_body(
                f"The request's body arrives at less than {limits.body_bytes_per_second:g} bytes a second; send it "
                "faster."
            )

    def _end_slow_body(self, sentence: str) -> None:
        if not self.cycle.response_started:
            self.transport.write(refusal(RequestTimeout(sentence)))
        self.transport.close()

    def _is_unread(self, now: float) -> bool:
        """Return whether the client has left sent bytes unread for too long."""
        num_bytes = self.transport.get_write_buffer_size() + _unacknowledged_bytes(self.transport)
        if not num_bytes:
            self._unread_since = None
        elif self._unread_since is None or num_bytes != self._num_unread_bytes:
            self._unread_since = now
        self._num_unread_bytes = num_bytes
        return _is_over(self._unread_since, self._limits.unread_seconds, now)


def _unacknowledged_bytes(transport: asyncio.Transport) -> int:
    """Return how many sent bytes the client has not acknowledged (SIOCOUTQ, tcp(7))."""
    try:
        num_bytes = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    except OSError:  # it has been closed
        return 0
    return int.from_bytes(num_bytes, sys.byteorder)


def _has_left(transport: asyncio.Transport) -> bool:
    """Return whether the client has ended the connection, which the event loop notices only while the server reads."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))


def _is_over(since: float | None, seconds: float, now: float) -> bool:
    return since is not None and now - since > seconds


async def _refuse_request(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer the request with the error that there are too many connections."""
    error = QueueFull(TOO_MANY)
    await send_json(send, error.status, encode_error(error))

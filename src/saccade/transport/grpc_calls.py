"""Makes streaming gRPC calls that push their messages: a single read callback serves all calls on a connection.

grpc.aio passes every message through a thread and a task, which takes 30 to 50 µs of CPU. Source: PROTOCOL-HTTP2.md in
gRPC's documentation.
"""

import asyncio
import contextlib
import logging
import math
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, cast

import grpc
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    DataReceived,
    Event,
    PingAckReceived,
    RemoteSettingsChanged,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
    WindowUpdated,
)
from h2.exceptions import DenialOfServiceError, FrameTooLargeError, ProtocolError, StreamClosedError
from h2.settings import SettingCodes, Settings

from saccade.transport import arrivals
from saccade.transport.allowance import Allowance
from saccade.transport.grpc_call import Call, Receiver

CONNECT_SECONDS = 10.0
WINDOW_BYTES = 2**31 - 1
"""The largest of HTTP/2. The sinks count what a slow client does not read, so flow control adds nothing."""

QUIET_SECONDS, ANSWER_SECONDS, STILL_QUIET_SECONDS = 30.0, 10.0, 300.0
"""After the first silence a server is asked whether it lives, and has the second time to answer. If its calls stay
silent, it is asked again after the third: gRPC's servers end a connection over more frequent pings."""

PIECE_BYTES = 128 << 10
"""The most in one frame. h2 copies each several times, larger ones in memory that is new every time."""

MAX_UNFINISHED_BYTES = 64 << 20
"""Of the messages of a connection that have not ended. The largest honest one has 20 log probabilities for each of
128,000 tokens of a prompt: 31 MB."""

IDLE_BURST, IDLE_PER_SECOND = 16_384, 256
"""Frames without content, such as pings, that a server may send, and h2 takes 10 to 20 µs for each. gRPC's servers send
up to two for a frame of data, either way, and few others; those two do not count."""

IDLE_FOR_DATA, IDLE_FOR_CALL = 2, 16

MAX_UNREAD_BYTES = 8 << 20
"""What waits for a server that does not read: the heads of calls, a piece of a message, acknowledgements."""

RUN_FRAMES = 32
"""Frames that h2 gets together, which takes it half a millisecond."""

DATA, GOAWAY, WINDOW_UPDATE = 0, 7, 8
PADDED = 8
"""A flag of DATA. What is left without the padding may be nothing."""
FRAME_HEADER = struct.Struct(">HBBBL")
"""The length without its last byte, that byte, type, flags and stream of a frame."""

LAST_STREAM_ID = 2**31 - 2**16
STATUS_OF_RESET: Final[dict[int, grpc.StatusCode]] = {
    ErrorCodes.REFUSED_STREAM: grpc.StatusCode.UNAVAILABLE,
    ErrorCodes.CANCEL: grpc.StatusCode.CANCELLED,
    ErrorCodes.ENHANCE_YOUR_CALM: grpc.StatusCode.RESOURCE_EXHAUSTED,
}

logger = logging.getLogger(__name__)


class GrpcCalls:
    """Makes calls to the server at *target*, `host:port`, with TLS if *tls* is set.

    It connects when a call needs a connection. *quiet_seconds* replaces QUIET_SECONDS and STILL_QUIET_SECONDS for a
    server that allows more pings. *max_unfinished_bytes* returns how many bytes a connection's incomplete messages may
    have in total.

    call = await calls.begin("/echo.Echo/Say", request.SerializeToString(), receiver)
    ...
    call.cancel()
    """

    def __init__(
        self,
        target: str,
        tls: ssl.SSLContext | None = None,
        quiet_seconds: tuple[float, float] | None = None,
        max_unfinished_bytes: Callable[[], int] = lambda: MAX_UNFINISHED_BYTES,
    ) -> None:
        self._max_unfinished_bytes = max_unfinished_bytes
        self._target = target
        self._tls = tls
        self._quiet_seconds = quiet_seconds or (QUIET_SECONDS, STILL_QUIET_SECONDS)
        self._connections: list[_Connection] = []
        self._lock = asyncio.Lock()

    async def begin(
        self, path: str, message: bytes | None, receiver: Receiver, metadata: Iterable[tuple[bytes, bytes]] = ()
    ) -> "Call":
        """Begin a call to the method *path* with *message* and *metadata*, and return the call.

        If *message* is None, send messages with the call's send().

        Raises OSError, such as TimeoutError, if a connection is needed and cannot be made.
        """
        async with self._lock:
            connection = next((one for one in self._connections if one.takes_calls), None)
            if connection is None:
                connection = await self._connect()
        call = Call(connection, path, message, receiver, metadata)
        connection.begin(call)
        return call

    def close(self) -> None:
        """End every call with the status CANCELLED."""
        for connection in self._connections:
            connection.lose(grpc.StatusCode.CANCELLED, "the connection was closed")

    async def _connect(self) -> "_Connection":
        scheme = "http" if self._tls is None else "https"
        connection = _Connection(self._target, scheme, *self._quiet_seconds, self._max_unfinished_bytes)
        host, _, port = self._target.rpartition(":")
        async with asyncio.timeout(CONNECT_SECONDS):
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda: connection, host.strip("[]"), int(port), ssl=self._tls)
        self._connections = [*(one for one in self._connections if one.is_open), connection]
        return connection


class _Data(NamedTuple):
    """The content of a DATA frame that has no flags."""

    stream_id: int
    payload: bytes


class _Connection(asyncio.Protocol):
    """A connection to *authority*.

    After the server's GOAWAY, it takes no further calls, and closes when its current ones have ended.
    """

    stream_id = 0

    def __init__(
        self,
        authority: str,
        scheme: str,
        quiet_seconds: float,
        still_quiet_seconds: float,
        max_unfinished_bytes: Callable[[], int],
    ) -> None:
        self._authority = authority.encode()
        self._scheme = scheme.encode()
        self._quiet_seconds = quiet_seconds
        self._still_quiet_seconds = still_quiet_seconds
        self._http = H2Connection(H2Configuration(client_side=True, header_encoding=None))
        self._http.local_settings = Settings(
            client=True,
            initial_values={SettingCodes.ENABLE_PUSH: 0, SettingCodes.INITIAL_WINDOW_SIZE: WINDOW_BYTES},
        )
        self._transport: asyncio.Transport | None = None
        self._calls: dict[int, Call] = {}
        self._waiting: deque[Call] = deque()
        self._max_unfinished_bytes = max_unfinished_bytes
        self._idle = Allowance(IDLE_BURST, IDLE_PER_SECOND)
        self._unread = b""
        self._num_read = 0
        self.num_uncredited_bytes = 0
        self._is_draining = False
        self._is_paused = False
        self._has_received = False
        self._is_pinged = False
        self._is_stuck = False
        """Whether calls wait although none is open."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        """Whether the connection carries calls or may still take some."""
        return self._transport is not None

    @property
    def takes_calls(self) -> bool:
        """Whether begin() may be called."""
        return not self._is_draining

    def begin(self, call: Call) -> None:
        """Send *call*, or keep it until the server allows another call."""
        self._waiting.append(call)
        self._begin_waiting()
        self._flush()
        if self._timer is None:
            self._watch(self._quiet_seconds)

    def send(self, call: Call) -> None:
        """Send what is left of *call*'s messages, if it has begun."""
        if call.stream_id in self._calls:
            self._send(call)

    def cancel(self, call: Call) -> None:
        """Forget *call*, and reset its stream if one is open."""
        with contextlib.suppress(ValueError):
            self._waiting.remove(call)
        if self._calls.pop(call.stream_id, None) is not None:
            # Its last frame, or the connection's end, may have arrived, and not been handed over.
            with contextlib.suppress(ProtocolError):
                self._http.reset_stream(call.stream_id, ErrorCodes.CANCEL)
            self._ended()

    def lose(self, status: grpc.StatusCode, details: str) -> None:
        """End the connection, and end every call with *status*. Unread data that has arrived is dropped."""
        self._is_draining = True
        self._unread, self._num_read = b"", 0
        calls = [*self._calls.values(), *self._waiting]
        self._calls.clear()
        self._waiting.clear()
        for call in calls:
            call.end(status, details)
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio's callbacks ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the HTTP/2 settings."""
        self._transport = cast("asyncio.Transport", transport)
        self._http.initiate_connection()
        self._http.increment_flow_control_window(WINDOW_BYTES - self._http.inbound_flow_control_window)
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """Read the data that has arrived, without sending anything, and end the remaining calls."""
        self._transport = None
        self._is_draining = True
        waiting, self._waiting = self._waiting, deque()
        for call in self._calls.values():
            call.unsent.clear()
        self._take_frames(math.inf)
        self._waiting = waiting
        self.lose(grpc.StatusCode.UNAVAILABLE, "the connection was lost")

    def data_received(self, data: bytes) -> None:
        self._has_received = True
        self._unread = self._unread[self._num_read :] + data
        self._num_read = 0
        self._take_turn()

    def _take_turn(self) -> None:
        """Take the frames that have arrived. If that takes long, other tasks run before more frames are read."""
        is_done = self._take_frames(time.monotonic() + arrivals.TURN_SECONDS)
        self._flush()
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self._is_paused and transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self.lose(grpc.StatusCode.UNAVAILABLE, "the server does not read what it is sent")
        elif not is_done:
            transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._go_on, transport)

    def _go_on(self, transport: asyncio.Transport) -> None:
        if not transport.is_closing():
            transport.resume_reading()
            self._take_turn()

    def _take_frames(self, deadline: float) -> bool:
        """Take the unread whole frames; return False if *deadline* comes first."""
        try:
            while self._num_read < len(self._unread) and (events := self._next_events()) is not None:
                for event in events:
                    self._take(event)
                if time.monotonic() > deadline:
                    return False
        except ProtocolError as error:
            self._flush()
            self.lose(grpc.StatusCode.INTERNAL, f"the server broke HTTP/2: {type(error).__name__}")
        return True

    def pause_writing(self) -> None:
        """Stop sending requests' messages for now."""
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._send_all()
        self._flush()

    def _next_events(self) -> Sequence[Event | _Data] | None:
        """Return the events in the next few frames, or None if there is no whole unread frame.

        h2 gets no GOAWAY frames, after which it would accept no frames of any call. Nor does it get an open call's DATA
        frames without flags, because it takes longer over them than everything else here. Raises ProtocolError,
        also if too many frames have no content.
        """
        unread, first, num_frames, num_useful = self._unread, self._num_read, 0, 0
        data: list[_Data] = []
        while num_frames + len(data) < RUN_FRAMES and len(unread) - self._num_read >= FRAME_HEADER.size:
            high, low, kind, flags, stream_id = FRAME_HEADER.unpack_from(unread, self._num_read)
            if (num_bytes := high << 8 | low) > self._http.max_inbound_frame_size:
                raise FrameTooLargeError("a frame is too large")
            body = self._num_read + FRAME_HEADER.size
            end = body + num_bytes
            is_data = kind == DATA and stream_id in self._calls
            is_plain = is_data and not flags
            if end > len(unread) or (data and not is_plain) or (num_frames and (is_plain or kind == GOAWAY)):
                break
            if is_data and num_bytes and not flags & PADDED:
                num_useful += 1
            elif not self._idle.spend():
                raise DenialOfServiceError("too many frames have no content")
            self._num_read = end
            if is_plain:
                data.append(_Data(stream_id, unread[body:end]))
            elif kind == GOAWAY:
                self._drain(int.from_bytes(unread[body:end][:4], "big"))
                return ()
            else:
                num_frames += 1
        self._idle.earn(IDLE_FOR_DATA * num_useful)
        return self._http.receive_data(unread[first : self._num_read]) if num_frames else data or None

    def _drain(self, last_stream_id: int) -> None:
        """Take no further calls, and end those that the server has not begun, which come after *last_stream_id*."""
        self._is_draining = True
        refused = [call for number, call in self._calls.items() if number > last_stream_id]
        for call in (*refused, *self._waiting):
            self._calls.pop(call.stream_id, None)
            call.end(grpc.StatusCode.UNAVAILABLE, "the server takes no further calls")
        self._waiting.clear()
        self._ended()

    def _take(self, event: Event | _Data) -> None:
        match event:
            case _Data(stream_id, payload):
                self._credit(self, len(payload))
                if (call := self._calls.get(stream_id)) is not None:
                    self._credit(call, len(payload))
                    self._read(call, payload)
            case DataReceived():
                self._http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                if (call := self._calls.get(event.stream_id)) is not None:
                    self._read(call, event.data)
            case ResponseReceived() | TrailersReceived():
                if (call := self._calls.get(event.stream_id)) is not None:
                    call.read_headers(event.headers)
            case StreamEnded():
                if (call := self._calls.pop(event.stream_id, None)) is not None:
                    call.end(*call.status)
                    self._ended()
            case StreamReset():
                if (call := self._calls.pop(event.stream_id, None)) is not None:
                    status = STATUS_OF_RESET.get(event.error_code, grpc.StatusCode.INTERNAL)
                    call.end(status, "the server reset the call")
                    self._ended()
            case WindowUpdated() | RemoteSettingsChanged():
                self._send_all()
            case PingAckReceived() if self._is_pinged and self._timer is not None:
                self._is_pinged = False
                self._watch(self._still_quiet_seconds)

    def _read(self, call: Call, data: bytes) -> None:
        try:
            for payload in call.messages(data, self._max_unfinished_bytes):
                self._hand_over(call, payload)
                if call.stream_id not in self._calls:
                    return
        except ValueError:
            call.cancel()
            call.end(grpc.StatusCode.INTERNAL, "the server sent a message that is compressed or too long")
        if call.num_unfinished_bytes > PIECE_BYTES:
            num_bytes = sum(one.num_unfinished_bytes for one in self._calls.values())
            if num_bytes > self._max_unfinished_bytes():
                self.lose(grpc.StatusCode.INTERNAL, "the server does not finish its messages")

    def _hand_over(self, call: Call, payload: bytes) -> None:
        try:
            call.receiver.message(payload)
        except Exception:
            logger.critical("a message met an unforeseen error", exc_info=True)
            call.cancel()
            call.end(grpc.StatusCode.INTERNAL, "its message met an unforeseen error")

    def _credit(self, window: "Call | _Connection", num_bytes: int) -> None:
        """Count the bytes that the server has sent in *window*. Past half of WINDOW_BYTES, allow it as many again."""
        window.num_uncredited_bytes += num_bytes
        if window.num_uncredited_bytes > WINDOW_BYTES // 2 and self._transport is not None:
            header = FRAME_HEADER.pack(0, 4, WINDOW_UPDATE, 0, window.stream_id)
            self._transport.write(header + window.num_uncredited_bytes.to_bytes(4, "big"))
            window.num_uncredited_bytes = 0

    def _ended(self) -> None:
        """Begin waiting calls, since another call has ended. Close the connection if it takes none and has none."""
        self._begin_waiting()
        self._flush()
        if self._is_draining and not self._calls and self._transport is not None:
            self._transport.close()

    def _begin_waiting(self) -> None:
        while self._waiting and self._http.open_outbound_streams < self._http.remote_settings.max_concurrent_streams:
            call = self._waiting.popleft()
            call.stream_id = self._http.get_next_available_stream_id()
            self._is_draining |= call.stream_id >= LAST_STREAM_ID
            self._calls[call.stream_id] = call
            self._idle.earn(IDLE_FOR_CALL)
            self._http.send_headers(
                call.stream_id,
                (
                    (b":method", b"POST"),
                    (b":scheme", self._scheme),
                    (b":path", call.path.encode()),
                    (b":authority", self._authority),
                    (b"te", b"trailers"),
                    (b"content-type", b"application/grpc"),
                    *call.metadata,
                ),
            )
            self._send(call)
        is_stuck = bool(self._waiting) and not self._calls
        if is_stuck and not self._is_stuck:
            self._watch(ANSWER_SECONDS)
        self._is_stuck = is_stuck

    def _send_all(self) -> None:
        for call in list(self._calls.values()):
            self._send(call)
        self._begin_waiting()

    def _send(self, call: Call) -> None:
        """Send as much of the rest of the call's messages as the server and the connection accept."""
        # If the server has just reset the stream, that event may not have been handed over.
        with contextlib.suppress(StreamClosedError):
            while call.unsent and not self._is_paused:
                # The window is negative if the server has made it smaller.
                window = max(0, self._http.local_flow_control_window(call.stream_id))
                message = call.unsent.popleft()
                piece = message[: min(window, self._http.max_outbound_frame_size, PIECE_BYTES)]
                if len(piece) < len(message):
                    call.unsent.appendleft(message[len(piece) :])
                if not piece:
                    return
                self._idle.earn(IDLE_FOR_DATA)
                self._http.send_data(call.stream_id, piece, end_stream=not (call.unsent or call.takes_more))
                self._flush()

    def _flush(self) -> None:
        if (data := self._http.data_to_send()) and self._transport is not None:
            self._transport.write(data)

    def _watch(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._check)

    def _check(self) -> None:
        """Check whether a silent server still answers."""
        self._timer = None
        if self._is_pinged:
            self.lose(grpc.StatusCode.UNAVAILABLE, "the server does not answer")
        elif self._is_stuck:
            self.lose(grpc.StatusCode.UNAVAILABLE, "the server allows no call")
        elif not self._calls:
            return
        elif self._has_received:
            self._has_received = False
            self._watch(self._quiet_seconds)
        else:
            self._is_pinged = True
            self._http.ping(b"saccade\0")
            self._flush()
            self._watch(ANSWER_SECONDS)

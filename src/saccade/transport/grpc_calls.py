"""Streaming gRPC calls whose messages are pushed: one read callback serves all calls to a server.

grpc.aio passes every message through a thread and a task, which takes 30 to 50 µs of CPU. Source of the wire:
PROTOCOL-HTTP2.md in gRPC's documentation.
"""

import asyncio
import contextlib
import ssl
import struct
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple, Protocol, cast
from urllib.parse import unquote

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
from h2.exceptions import FrameTooLargeError, ProtocolError, StreamClosedError
from h2.settings import SettingCodes, Settings

from saccade.transport.arrivals import Arrivals
from saccade.transport.wire import MAX_MESSAGE_BYTES

CONNECT_SECONDS = 10.0
WINDOW_BYTES = 2**31 - 1
"""The largest of HTTP/2. The sinks count what a slow client does not read, so flow control adds nothing."""

QUIET_SECONDS, ANSWER_SECONDS, STILL_QUIET_SECONDS = 30.0, 10.0, 300.0
"""After the first silence a server is asked whether it lives, and has the second time to answer. If its calls stay
silent, it is asked again after the third: gRPC's servers end a connection over more frequent pings."""

PIECE_BYTES = 128 << 10
"""The most in one frame. h2 copies each several times, larger ones in memory that is new every time."""

DATA, GOAWAY, WINDOW_UPDATE = 0, 7, 8
FRAME_HEADER = struct.Struct(">HBBBL")
"""The length without its last byte, that byte, type, flags and stream of a frame."""

PREFIX_BYTES = 5
LAST_STREAM_ID = 2**31 - 2**16
STATUS: Final = {str(code.value[0]).encode(): code for code in grpc.StatusCode}
STATUS_OF_RESET: Final[dict[int, grpc.StatusCode]] = {
    ErrorCodes.REFUSED_STREAM: grpc.StatusCode.UNAVAILABLE,
    ErrorCodes.CANCEL: grpc.StatusCode.CANCELLED,
    ErrorCodes.ENHANCE_YOUR_CALM: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
BUSY: Final = (b"429", b"502", b"503", b"504")
"""HTTP statuses of proxies after which another attempt may succeed."""


class Receiver(Protocol):
    """Takes the messages of one call, then its end. Its methods must not raise."""

    def message(self, payload: bytes) -> None:
        """Take a message."""

    def end(self, status: grpc.StatusCode, details: str) -> None:
        """Take the status with which the call ends."""


class GrpcCalls:
    """Calls to the server at *target*, `host:port`, with TLS if *tls* is set. A connection is made when a call needs
    one. *quiet_seconds* replaces QUIET_SECONDS and STILL_QUIET_SECONDS for a server that allows more pings.

    call = await calls.begin("/echo.Echo/Say", request.SerializeToString(), receiver)
    ...
    call.cancel()
    """

    def __init__(
        self, target: str, tls: ssl.SSLContext | None = None, quiet_seconds: tuple[float, float] | None = None
    ) -> None:
        self._target = target
        self._tls = tls
        self._quiet_seconds = quiet_seconds or (QUIET_SECONDS, STILL_QUIET_SECONDS)
        self._connections: list[_Connection] = []
        self._lock = asyncio.Lock()

    async def begin(
        self, path: str, message: bytes | None, receiver: Receiver, metadata: Iterable[tuple[bytes, bytes]] = ()
    ) -> "Call":
        """Send *message* with *metadata* to the method *path*; if it is None, the call's send() sends its messages.

        Raises OSError, such as TimeoutError, if the server does not accept.
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
        connection = _Connection(self._target, "http" if self._tls is None else "https", *self._quiet_seconds)
        host, _, port = self._target.rpartition(":")
        async with asyncio.timeout(CONNECT_SECONDS):
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda: connection, host.strip("[]"), int(port), ssl=self._tls)
        self._connections = [*(one for one in self._connections if one.is_open), connection]
        return connection


class Call:
    """A call of the method *path* under way."""

    def __init__(
        self,
        connection: "_Connection",
        path: str,
        message: bytes | None,
        receiver: Receiver,
        metadata: Iterable[tuple[bytes, bytes]],
    ) -> None:
        self.path = path
        self.receiver = receiver
        self.metadata = metadata
        self.unsent = deque([] if message is None else [_prefixed(message)])
        self.takes_more = message is None
        self.num_uncredited_bytes = 0
        self.stream_id = 0
        self.status: tuple[grpc.StatusCode, str] = grpc.StatusCode.UNKNOWN, "the server sent no status"
        self._connection = connection
        self._partial = bytearray()

    def send(self, *parts: bytes) -> None:
        """Send one more message, which *parts* are together; only for a call that began without one."""
        self.unsent.append(_prefixed(*parts))
        self._connection.send(self)

    def cancel(self) -> None:
        """Tell the server to stop. The receiver gets no further call."""
        self._connection.cancel(self)

    def read_headers(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Note the status in *headers*, which are the trailers or those of an answer without messages."""
        values = dict(headers)
        if (http := values.get(b":status", b"200")) != b"200":
            code = grpc.StatusCode.UNAVAILABLE if http in BUSY else grpc.StatusCode.UNKNOWN
            self.status = code, f"HTTP status {http.decode(errors='replace')}"
        elif (text := values.get(b"grpc-status", b"")).isdigit():
            details = unquote(values.get(b"grpc-message", b"").decode(errors="replace"))
            self.status = STATUS.get(text.lstrip(b"0") or b"0", grpc.StatusCode.UNKNOWN), details

    def messages(self, data: bytes) -> Iterator[bytes]:
        """Yield the messages that *data* completes. Raises ValueError for one that is compressed or too long."""
        num_bytes = len(data) - PREFIX_BYTES
        if not self._partial and num_bytes >= 0 and data.startswith(_prefix(num_bytes)):
            # The usual case: a message arrives alone and complete.
            yield data[PREFIX_BYTES:]
            return
        # To join the pieces of a long message each time would take time that grows with its square.
        self._partial += data
        while len(self._partial) >= PREFIX_BYTES:
            num_bytes = int.from_bytes(self._partial[1:PREFIX_BYTES], "big")
            if self._partial[0] or num_bytes > MAX_MESSAGE_BYTES:
                raise ValueError
            end = PREFIX_BYTES + num_bytes
            if end > len(self._partial):
                return
            message = bytes(self._partial[PREFIX_BYTES:end])
            del self._partial[:end]
            yield message


class _Data(NamedTuple):
    """The content of a DATA frame without flags."""

    stream_id: int
    payload: bytes


def _prefix(num_bytes: int) -> bytes:
    return b"\0" + num_bytes.to_bytes(4, "big")


def _prefixed(*parts: bytes) -> memoryview:
    return memoryview(b"".join((_prefix(sum(map(len, parts))), *parts)))


class _Connection(asyncio.Protocol):
    """A connection to *authority*. Once the server has sent GOAWAY it takes no further calls, and closes after them."""

    stream_id = 0

    def __init__(self, authority: str, scheme: str, quiet_seconds: float, still_quiet_seconds: float) -> None:
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
        self._events: Arrivals[Event | _Data] = Arrivals(self._take)
        self._part_of_frame = b""
        self.num_uncredited_bytes = 0
        self._is_draining = False
        self._is_paused = False
        self._has_received = False
        self._is_pinged = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        """Whether it carries calls, or may."""
        return self._transport is not None

    @property
    def takes_calls(self) -> bool:
        """Whether begin() may be called."""
        return not self._is_draining

    def begin(self, call: Call) -> None:
        """Send *call*, or keep it until the server allows one more."""
        self._waiting.append(call)
        self._begin_waiting()
        self._flush()
        if self._timer is None:
            self._watch(self._quiet_seconds)

    def send(self, call: Call) -> None:
        """Send what is left of the messages of *call*, once it has begun."""
        if call.stream_id in self._calls:
            self._send(call)

    def cancel(self, call: Call) -> None:
        """Reset the stream of *call* if one is open."""
        with contextlib.suppress(ValueError):
            self._waiting.remove(call)
        if self._calls.pop(call.stream_id, None) is not None:
            # Its last frame, or the connection's end, may have arrived, and not been handed over.
            with contextlib.suppress(ProtocolError):
                self._http.reset_stream(call.stream_id, ErrorCodes.CANCEL)
            self._ended()

    def lose(self, status: grpc.StatusCode, details: str) -> None:
        """End the connection, and every call with *status*."""
        self._is_draining = True
        # What has arrived is handed over, which must not send anything: h2 may have closed the connection.
        waiting, self._waiting = self._waiting, deque()
        for call in self._calls.values():
            call.unsent.clear()
        self._events.finish()
        calls = [*self._calls.values(), *waiting]
        self._calls.clear()
        for call in calls:
            call.receiver.end(status, details)
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio's callbacks ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the settings."""
        self._transport = cast("asyncio.Transport", transport)
        self._http.initiate_connection()
        self._http.increment_flow_control_window(WINDOW_BYTES - self._http.inbound_flow_control_window)
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.lose(grpc.StatusCode.UNAVAILABLE, "the connection was lost")

    def data_received(self, data: bytes) -> None:
        self._has_received = True
        try:
            events = list(self._received(data))
        except ProtocolError as error:
            self._flush()
            self.lose(grpc.StatusCode.INTERNAL, f"the server broke HTTP/2: {type(error).__name__}")
            return
        self._events.add(events)
        self._flush()

    def pause_writing(self) -> None:
        """Send no more of a request's message for now."""
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._send_all()
        self._flush()

    def _received(self, data: bytes) -> Iterator[Event | _Data]:
        """Yield what the whole frames in *data* and before it bring.

        h2 gets no GOAWAY, after which it takes no frame of any call. It gets no DATA of a call without flags either,
        since it takes longer for that than all that follows.
        """
        data, first, start = self._part_of_frame + data, 0, 0
        while len(data) - start >= FRAME_HEADER.size:
            high, low, kind, flags, stream_id = FRAME_HEADER.unpack_from(data, start)
            if (num_bytes := high << 8 | low) > self._http.max_inbound_frame_size:
                raise FrameTooLargeError("a frame is too large")
            body = start + FRAME_HEADER.size
            end = body + num_bytes
            if end > len(data):
                break
            if kind == GOAWAY or (kind == DATA and not flags and stream_id in self._calls):
                if first < start:
                    yield from self._http.receive_data(data[first:start])
                first = end
                if kind == DATA:
                    yield _Data(stream_id, data[body:end])
                else:
                    self._drain(int.from_bytes(data[body:end][:4], "big"))
            start = end
        self._part_of_frame = data[start:]
        if first < start:
            yield from self._http.receive_data(data[first:start])

    def _drain(self, last_stream_id: int) -> None:
        """Take no further calls; the server has not begun those after *last_stream_id*."""
        self._is_draining = True
        refused = [call for number, call in self._calls.items() if number > last_stream_id]
        for call in (*refused, *self._waiting):
            self._calls.pop(call.stream_id, None)
            call.receiver.end(grpc.StatusCode.UNAVAILABLE, "the server takes no further calls")
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
                    call.receiver.end(*call.status)
                    self._ended()
            case StreamReset():
                if (call := self._calls.pop(event.stream_id, None)) is not None:
                    status = STATUS_OF_RESET.get(event.error_code, grpc.StatusCode.INTERNAL)
                    call.receiver.end(status, "the server reset the call")
                    self._ended()
            case WindowUpdated() | RemoteSettingsChanged():
                self._send_all()
            case PingAckReceived() if self._is_pinged and self._timer is not None:
                self._is_pinged = False
                self._timer.cancel()
                self._watch(self._still_quiet_seconds)

    def _read(self, call: Call, data: bytes) -> None:
        try:
            for payload in call.messages(data):
                call.receiver.message(payload)
                if call.stream_id not in self._calls:
                    return
        except ValueError:
            call.cancel()
            call.receiver.end(grpc.StatusCode.INTERNAL, "the server sent a message that is compressed or too long")

    def _credit(self, window: "Call | _Connection", num_bytes: int) -> None:
        """Let the server send as much as it has sent in *window*."""
        window.num_uncredited_bytes += num_bytes
        if window.num_uncredited_bytes > WINDOW_BYTES // 2 and self._transport is not None:
            header = FRAME_HEADER.pack(0, 4, WINDOW_UPDATE, 0, window.stream_id)
            self._transport.write(header + window.num_uncredited_bytes.to_bytes(4, "big"))
            window.num_uncredited_bytes = 0

    def _ended(self) -> None:
        """Begin a call that waits, since another one has ended; or close, if none may begin and none is open."""
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

    def _send_all(self) -> None:
        for call in list(self._calls.values()):
            self._send(call)
        self._begin_waiting()

    def _send(self, call: Call) -> None:
        """Send what is left of the call's messages, as far as the server and the connection take it."""
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
                self._http.send_data(call.stream_id, piece, end_stream=not (call.unsent or call.takes_more))
                self._flush()

    def _flush(self) -> None:
        if (data := self._http.data_to_send()) and self._transport is not None:
            self._transport.write(data)

    def _watch(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._check)

    def _check(self) -> None:
        """Find out whether a silent server still answers."""
        self._timer = None
        if self._is_pinged:
            self.lose(grpc.StatusCode.UNAVAILABLE, "the server does not answer")
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

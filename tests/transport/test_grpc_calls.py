"""Calls over HTTP/2 against gRPC's own server, and against a server that breaks every habit."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Iterator

import grpc
import pytest
from echo_worker import until
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, Event, PingReceived, RequestReceived, SettingsAcknowledged, StreamEnded
from h2.settings import SettingCodes
from hyperframe.frame import GoAwayFrame, RstStreamFrame
from tables import table

from saccade.transport import arrivals, grpc_calls
from saccade.transport.grpc_calls import GrpcCalls

PATH, OPEN_PATH = "/test.Echo/Say", "/test.Echo/Repeat"


class Heard:
    """What a call brought."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.status: tuple[grpc.StatusCode, str] | None = None

    def message(self, payload: bytes) -> None:
        assert self.status is None
        self.messages.append(payload)

    def end(self, status: grpc.StatusCode, details: str) -> None:
        assert self.status is None
        self.status = status, details


class Echo(grpc.GenericRpcHandler):
    """Answers each request with its lines; "fail" ends with an error, "wait" goes on when it is told to."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.metadata: dict[str, str] = {}
        self.num_cancelled = self.num_open = self.most_open = 0

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        if details.method == OPEN_PATH:
            return grpc.stream_stream_rpc_method_handler(self.repeat)
        return grpc.unary_stream_rpc_method_handler(self.say)

    async def repeat(self, requests: AsyncIterator[bytes], _: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    async def say(self, request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        self.num_open += 1
        self.metadata = dict(context.invocation_metadata() or ())
        self.most_open = max(self.most_open, self.num_open)
        try:
            for line in request.split(b"\n"):
                if line == b"fail":
                    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no: 100 % ü")
                if line == b"wait":
                    await self.go_on.wait()
                yield line
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_open -= 1


@contextlib.asynccontextmanager
async def echoing(*options: tuple[str, int]) -> AsyncIterator[tuple[Echo, GrpcCalls, grpc.aio.Server]]:
    echo = Echo()
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1), *options])
    server.add_generic_rpc_handlers((echo,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    calls = GrpcCalls(f"127.0.0.1:{port}")
    try:
        yield echo, calls, server
    finally:
        calls.close()
        await server.stop(0)


async def ended(calls: GrpcCalls, request: bytes) -> Heard:
    heard = Heard()
    await calls.begin(PATH, request, heard)
    await until(lambda: heard.status is not None)
    return heard


async def until_refused(calls: GrpcCalls) -> None:
    """Return when the server, which drains, takes no further call."""
    with contextlib.suppress(OSError):
        while True:
            (await calls.begin(PATH, b"another", Heard())).cancel()
            await asyncio.sleep(0.01)


async def test_messages_come_in_order_and_then_the_status() -> None:
    async with echoing() as (_, calls, _):
        heard = await asyncio.gather(*(ended(calls, b"%d\n\nlast" % number) for number in range(20)))
    assert [one.messages for one in heard] == [[b"%d" % number, b"", b"last"] for number in range(20)]
    assert {one.status for one in heard} == {(grpc.StatusCode.OK, "")}


async def test_metadata_reaches_the_server() -> None:
    async with echoing() as (echo, calls, _):
        heard = Heard()
        await calls.begin(PATH, b"a", heard, [(b"traceparent", b"00-1-2-01")])
        await until(lambda: heard.status)
    assert echo.metadata["traceparent"] == "00-1-2-01"


async def test_error_has_its_code_and_its_details() -> None:
    async with echoing() as (_, calls, _):
        heard = await ended(calls, b"one\nfail")
        at_once = await ended(calls, b"fail")
    assert heard.messages == [b"one"]
    assert heard.status == at_once.status == (grpc.StatusCode.FAILED_PRECONDITION, "no: 100 % ü")


async def test_long_messages_pass_the_windows_of_both_ends() -> None:
    long = random.Random(1).randbytes(3 << 20).replace(b"\n", b" ")
    async with echoing(("grpc.max_send_message_length", -1)) as (_, calls, _):
        heard = await ended(calls, b"\n".join([long, b"short", long]))
    assert heard.messages == [long, b"short", long]


async def test_open_call_sends_messages_until_it_is_cancelled() -> None:
    sent = [b"one", bytes(3 << 20), b"", b"last"]
    async with echoing() as (_, calls, _):
        heard = Heard()
        call = await calls.begin(OPEN_PATH, None, heard)
        for message in sent[:2]:
            call.send(message)
        await until(lambda: len(heard.messages) == 2)
        call.send(sent[2])
        call.send(sent[3][:2], sent[3][2:])
        await until(lambda: len(heard.messages) == 4)
        call.cancel()
        call.send(b"too late")
    assert heard.messages == sent
    assert heard.status is None


async def test_open_call_receives_more_than_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_calls, "WINDOW_BYTES", 1 << 17)
    async with echoing() as (_, calls, _):
        heard = Heard()
        call = await calls.begin(OPEN_PATH, None, heard)
        for number in range(20):
            call.send(bytes(1 << 16))
            await until(lambda most=number: len(heard.messages) > most)


async def test_cancelled_call_ends_at_the_server_and_says_no_more() -> None:
    async with echoing() as (echo, calls, _):
        heard, other = Heard(), Heard()
        call = await calls.begin(PATH, b"one\nwait", heard)
        await calls.begin(PATH, b"wait", other)
        await until(lambda: bool(heard.messages))
        call.cancel()
        call.cancel()
        await until(lambda: echo.num_cancelled == 1)
        echo.go_on.set()
        await until(lambda: other.status is not None)
    assert (heard.messages, heard.status) == ([b"one"], None)


async def test_calls_wait_while_the_server_has_as_many_as_it_allows() -> None:
    async with echoing(("grpc.max_concurrent_streams", 2)) as (echo, calls, _):
        await ended(calls, b"the settings have arrived")
        heard = [Heard() for _ in range(6)]
        begun = [await calls.begin(PATH, b"wait", one) for one in heard]
        await until(lambda: echo.num_open == 2)
        begun[5].cancel()
        echo.go_on.set()
        await until(lambda: all(one.status is not None for one in heard[:5]))
    assert echo.most_open == 2
    assert heard[5].status is None


async def drained(calls: GrpcCalls, server: grpc.aio.Server) -> tuple[Heard, asyncio.Task[None]]:
    """Begin a call, and have the server drain, which lasts until the task ends."""
    heard = Heard()
    await calls.begin(PATH, b"one\nwait\ntwo", heard)
    await until(lambda: bool(heard.messages))
    stopping = asyncio.create_task(server.stop(30))
    await until_refused(calls)
    return heard, stopping


async def test_server_that_drains_ends_its_calls_and_gets_no_more() -> None:
    async with echoing() as (echo, calls, server):
        heard, stopping = await drained(calls, server)
        echo.go_on.set()
        await until(lambda: heard.status is not None)
        await stopping
    assert heard.messages == [b"one", b"wait", b"two"]
    assert heard.status == (grpc.StatusCode.OK, "")


async def test_close_ends_the_calls_of_a_server_that_drains_too() -> None:
    async with echoing() as (_, calls, server):
        heard, stopping = await drained(calls, server)
        calls.close()
        assert heard.status is not None
        assert heard.status[0] is grpc.StatusCode.CANCELLED
        await stopping


async def test_server_that_dies_fails_its_calls_and_a_new_one_is_found() -> None:
    async with echoing() as (_, calls, server):
        heard = Heard()
        await calls.begin(PATH, b"wait", heard)
        await server.stop(0)
        await until(lambda: heard.status is not None)
    assert heard.status is not None
    assert heard.status[0] in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


# --- a server that sends what it likes ---


class Raw(asyncio.Protocol):
    """A server that answers each request with what *answer* sends. *on_event* may send more, after any event."""

    def __init__(
        self, answer: Callable[["Raw", int], object], on_event: Callable[["Raw", Event], object] = lambda *_: None
    ) -> None:
        self.http = H2Connection(H2Configuration(client_side=False, header_encoding=None))
        self.num_pings = 0
        self._answer = answer
        self._on_event = on_event

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self.http.initiate_connection()
        self.flush()

    def data_received(self, data: bytes) -> None:
        for event in self.http.receive_data(data):
            if isinstance(event, StreamEnded):
                self._answer(self, event.stream_id)
            self.num_pings += isinstance(event, PingReceived)
            if isinstance(event, DataReceived):
                self.http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            assert not isinstance(event, RequestReceived) or dict(event.headers)[b":path"] == PATH.encode()
            self._on_event(self, event)
        self.flush()

    def headers(self, stream_id: int, *headers: tuple[bytes, bytes], end: bool = False) -> None:
        self.http.send_headers(stream_id, [(b":status", b"200"), *headers], end_stream=end)

    def flush(self) -> None:
        self.transport.write(self.http.data_to_send())

    def send(self, *frames: GoAwayFrame | RstStreamFrame) -> None:
        self.transport.write(self.http.data_to_send() + b"".join(frame.serialize() for frame in frames))


@contextlib.asynccontextmanager
async def raw(
    answer: Callable[[Raw, int], object], on_event: Callable[[Raw, Event], object] = lambda *_: None
) -> AsyncIterator[tuple[GrpcCalls, list[Raw]]]:
    made: list[Raw] = []

    def connection() -> Raw:
        made.append(Raw(answer, on_event))
        return made[-1]

    server = await asyncio.get_running_loop().create_server(connection, "127.0.0.1", 0)
    calls = GrpcCalls(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        yield calls, made
    finally:
        calls.close()
        server.close()
        for one in made:
            one.transport.abort()


def _reset(server: Raw, stream_id: int) -> None:
    server.headers(stream_id)
    frame = RstStreamFrame(stream_id)
    frame.error_code = 11
    server.send(frame)


def _compressed(server: Raw, stream_id: int) -> None:
    server.headers(stream_id)
    server.http.send_data(stream_id, b"\1\0\0\0\1x")


def _too_long(server: Raw, stream_id: int) -> None:
    server.headers(stream_id)
    server.http.send_data(stream_id, b"\0\xff\xff\xff\xff")


def _no_status(server: Raw, stream_id: int) -> None:
    server.headers(stream_id, end=True)


def _proxy(server: Raw, stream_id: int) -> None:
    server.http.send_headers(stream_id, [(b":status", b"503")], end_stream=True)


def _unknown_status(server: Raw, stream_id: int) -> None:
    server.headers(stream_id, (b"grpc-status", b"99"), end=True)


def _long_status(server: Raw, stream_id: int) -> None:
    server.headers(stream_id, (b"grpc-status", b"9" * 5000), end=True)


def _long_zero(server: Raw, stream_id: int) -> None:
    server.headers(stream_id, (b"grpc-status", b"0" * 5000), end=True)


def _long_trailers(server: Raw, stream_id: int) -> None:
    server.headers(stream_id)
    server.http.send_headers(stream_id, [(b"grpc-status", b"3"), (b"grpc-message", b"%20" * 10_000)], end_stream=True)


def _refused(server: Raw, _: int) -> None:
    server.send(GoAwayFrame(0, last_stream_id=0))


def _larger_frame_than_allowed(server: Raw, stream_id: int) -> None:
    server.headers(stream_id)
    server.flush()
    server.transport.write((1 << 20).to_bytes(3, "big") + b"\0\0" + stream_id.to_bytes(4, "big"))


def _nothing(server: Raw, _: int) -> None:
    pass


def _deaf(server: Raw, _: int) -> None:
    server.transport.pause_reading()


def _no_http(server: Raw, _: int) -> None:
    server.transport.write(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9)


@table(
    ("answer", "status"),
    [
        (_reset, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (_compressed, grpc.StatusCode.INTERNAL),
        (_too_long, grpc.StatusCode.INTERNAL),
        (_no_status, grpc.StatusCode.UNKNOWN),
        (_proxy, grpc.StatusCode.UNAVAILABLE),
        (_unknown_status, grpc.StatusCode.UNKNOWN),
        (_long_status, grpc.StatusCode.UNKNOWN),
        (_long_zero, grpc.StatusCode.UNKNOWN),
        (_long_trailers, grpc.StatusCode.INVALID_ARGUMENT),
        (_refused, grpc.StatusCode.UNAVAILABLE),
        (_larger_frame_than_allowed, grpc.StatusCode.INTERNAL),
        (_no_http, grpc.StatusCode.INTERNAL),
    ],
)
async def test_end_of_a_call(answer: Callable[[Raw, int], object], status: grpc.StatusCode) -> None:
    async with raw(answer) as (calls, made):
        heard = await ended(calls, b"x")
        assert heard.status is not None
        assert heard.status[0] is status
        # Another call is possible, over this connection or a new one.
        await ended(calls, b"x")
        assert 1 <= len(made) <= 2


def _reset_with_more_room(server: Raw, event: Event) -> None:
    """Reset a call whose message is long, together with more room for the whole connection."""
    if isinstance(event, DataReceived) and len(event.data) > 1000:
        server.http.increment_flow_control_window(1000)
        frame = RstStreamFrame(event.stream_id)
        frame.error_code = 11
        server.send(frame)


def _shrink_the_window(server: Raw, event: Event) -> None:
    """Make the windows smaller than what was sent; then make room for the rest of the call."""
    if isinstance(event, DataReceived) and server.http.local_settings.initial_window_size > 10:
        server.http.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 10})
    elif isinstance(event, SettingsAcknowledged) and event.changed_settings:
        server.http.increment_flow_control_window(1 << 20, 3)


@table(
    ("on_event", "status"),
    [(_reset_with_more_room, grpc.StatusCode.RESOURCE_EXHAUSTED), (_shrink_the_window, grpc.StatusCode.UNKNOWN)],
)
async def test_server_that_stops_a_message_harms_no_other_call(
    on_event: Callable[[Raw, Event], object], status: grpc.StatusCode
) -> None:
    def answer(server: Raw, stream_id: int) -> None:
        if stream_id > 1:
            server.headers(stream_id, end=True)

    async with raw(answer, on_event) as (calls, made):
        other = Heard()
        await calls.begin(PATH, b"waits", other)
        heard = await ended(calls, bytes(200_000))
        assert heard.status is not None
        assert (heard.status[0], other.status) == (status, None)
        await ended(calls, b"x")
        assert len(made) == 1


async def test_connection_that_breaks_behind_many_events_ends_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "TURN_SECONDS", 0.0)  # one event in a round of the loop

    def on_event(server: Raw, event: Event) -> None:
        if isinstance(event, DataReceived) and len(event.data) > 1000:
            for _ in range(300):
                server.http.increment_flow_control_window(1)
            server.flush()
            short_ping = b"\0\0\1\6\0\0\0\0\0x"
            asyncio.get_running_loop().call_later(0.001, server.transport.write, short_ping)

    async with raw(_nothing, on_event) as (calls, _):
        heard = [Heard(), Heard()]
        await calls.begin(PATH, b"waits", heard[0])
        await calls.begin(PATH, bytes(200_000), heard[1])
        await until(lambda: all(one.status is not None for one in heard))
    assert {one.status and one.status[0] for one in heard} <= {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE}


async def test_messages_in_pieces_of_any_size() -> None:
    messages = [b"x" * size for size in (0, 1, 3, 40_000, 2, 0)]
    framed = b"".join(b"\0" + len(one).to_bytes(4, "big") + one for one in messages)
    sizes = random.Random(2)

    def answer(server: Raw, stream_id: int) -> None:
        server.headers(stream_id)
        start = 0
        while start < len(framed):
            end = start + sizes.choice((1, 2, 5, 6, 100, 16_000))
            server.http.send_data(stream_id, framed[start:end], pad_length=sizes.choice((None, 0, 9)))
            start = end
        server.http.send_headers(stream_id, [(b"grpc-status", b"0")], end_stream=True)

    async with raw(answer) as (calls, _):
        for _ in range(5):
            heard = await ended(calls, b"x")
            assert (heard.messages, heard.status) == (messages, (grpc.StatusCode.OK, ""))


async def test_what_follows_goaway_is_received() -> None:
    def answer(server: Raw, stream_id: int) -> None:
        server.headers(stream_id)
        server.http.send_data(stream_id, b"\0\0\0\0\1a")
        server.send(GoAwayFrame(0, last_stream_id=2**31 - 1))
        server.http.send_data(stream_id, b"\0\0\0\0\1b")
        server.flush()
        server.send(GoAwayFrame(0, last_stream_id=stream_id))
        server.http.send_headers(stream_id, [(b"grpc-status", b"0")], end_stream=True)

    async with raw(answer) as (calls, made):
        assert (await ended(calls, b"x")).messages == [b"a", b"b"]
        assert (await ended(calls, b"x")).messages == [b"a", b"b"]
        await until(lambda: made[0].transport.is_closing())
    assert len(made) == 2


@table(("answer", "status"), [(_nothing, None), (_deaf, (grpc.StatusCode.UNAVAILABLE, "the server does not answer"))])
async def test_silent_server_is_asked_whether_it_lives(
    answer: Callable[[Raw, int], object],
    status: tuple[grpc.StatusCode, str] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grpc_calls, "QUIET_SECONDS", 0.01)
    monkeypatch.setattr(grpc_calls, "ANSWER_SECONDS", 5.0 if status is None else 0.05)
    monkeypatch.setattr(grpc_calls, "STILL_QUIET_SECONDS", 0.01)
    async with raw(answer) as (calls, made):
        heard = Heard()
        await calls.begin(PATH, b"x", heard)
        await until(lambda: heard.status is not None or made[0].num_pings == 3)
        assert heard.status == status


def frame(kind: int, flags: int = 0, stream_id: int = 0, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big") + payload


FLOODS = {
    "SETTINGS": frame(4),
    "acknowledgements of SETTINGS": frame(4, 1),
    "PING": frame(6, 0, 0, b"12345678"),
    "acknowledgements of PING": frame(6, 1, 0, b"12345678"),
    "DATA without content": frame(0, 0, 1),
    "DATA of a call that is not open": frame(0, 0, 99, b"x"),
    "DATA of padding": frame(0, 8, 1, b"\x04\0\0\0\0"),
    "WINDOW_UPDATE": frame(8, 0, 0, b"\0\0\0\1"),
    "WINDOW_UPDATE of a call": frame(8, 0, 1, b"\0\0\0\1"),
    "PRIORITY": frame(2, 0, 1, b"\0\0\0\0\1"),
    "unknown frames": frame(200),
    "GOAWAY": frame(7, 0, 0, (2**31 - 1).to_bytes(4, "big") + bytes(4)),
    "RST_STREAM of a call that is not open": frame(3, 0, 99, bytes(4)),
    "informational headers": frame(1, 4, 1, b"\x08\x03100"),
    "CONTINUATION": frame(9, 0, 1, b"x"),
    "PUSH_PROMISE": frame(5, 4, 1, b"\0\0\0\2"),
}


@table("name", FLOODS)
async def test_frames_without_content_end_the_connection_and_its_calls(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are counted, so it takes the same number of frames on any machine."""
    monkeypatch.setattr(grpc_calls, "IDLE_BURST", 200)
    monkeypatch.setattr(grpc_calls, "IDLE_PER_SECOND", 0)

    def answer(server: Raw, stream_id: int) -> None:
        server.headers(stream_id)
        server.flush()
        server.transport.write(FLOODS[name] * 400)

    async with raw(answer) as (calls, made):
        heard = [Heard(), Heard(), Heard()]
        for one in heard:
            await calls.begin(PATH, b"x", one)
        await until(lambda: all(one.status is not None for one in heard))
        assert {one.status and one.status[0] for one in heard} <= {
            grpc.StatusCode.INTERNAL,
            grpc.StatusCode.UNAVAILABLE,
        }
        await until(lambda: made[0].transport.is_closing())


async def test_honest_server_may_ping_for_each_frame_of_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_calls, "IDLE_BURST", 20)
    monkeypatch.setattr(grpc_calls, "IDLE_PER_SECOND", 0)

    def answer(server: Raw, stream_id: int) -> None:
        server.headers(stream_id)
        for number in range(200):
            server.http.ping(b"%08d" % number)
            server.http.increment_flow_control_window(1)
            server.http.send_data(stream_id, b"\0\0\0\0\1a")
        server.http.send_headers(stream_id, [(b"grpc-status", b"0")], end_stream=True)

    async with raw(answer) as (calls, made):
        heard = await ended(calls, bytes(1 << 20))
        assert (len(heard.messages), heard.status) == (200, (grpc.StatusCode.OK, ""))
        assert len(made) == 1


async def test_frames_of_one_read_are_taken_in_turns_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "TURN_SECONDS", -1.0)
    monkeypatch.setattr(grpc_calls, "RUN_FRAMES", 1)

    def answer(server: Raw, stream_id: int) -> None:
        server.headers(stream_id)
        for number in range(100):
            server.http.send_data(stream_id, b"\0\0\0\0\1%c" % number)
        server.http.send_headers(stream_id, [(b"grpc-status", b"0")], end_stream=True)

    async with raw(answer) as (calls, _):
        heard, seen = Heard(), set[int]()
        await calls.begin(PATH, b"x", heard)
        while heard.status is None:
            seen.add(len(heard.messages))
            await asyncio.sleep(0)
    assert heard.messages == [b"%c" % number for number in range(100)]
    assert set(range(1, 100)) <= seen


@table("method", ["message", "end"])
async def test_an_error_of_one_receiver_harms_no_other_call(method: str, caplog: pytest.LogCaptureFixture) -> None:
    class Bad(Heard):
        def message(self, payload: bytes) -> None:
            if method == "message":
                raise RuntimeError
            super().message(payload)

        def end(self, status: grpc.StatusCode, details: str) -> None:
            super().end(status, details)
            if method == "end":
                raise RuntimeError

    def answer(server: Raw, stream_id: int) -> None:
        if stream_id == 5:
            for one in (1, 3, 5):
                server.headers(one)
                server.http.send_data(one, b"\0\0\0\0\1a")
            server.flush()
            server.transport.close()

    async with raw(answer) as (calls, _):
        heard = [Heard(), Bad(), Heard()]
        for one in heard:
            await calls.begin(PATH, b"x", one)
        await until(lambda: all(one.status is not None for one in heard))
        assert [one.messages for one in heard] == [[b"a"], [b"a"] if method == "end" else [], [b"a"]]
    assert [record.levelname for record in caplog.records] == ["CRITICAL"]
    caplog.clear()


async def test_calls_end_if_the_server_allows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_calls, "ANSWER_SECONDS", 0.05)

    def answer(server: Raw, stream_id: int) -> None:
        server.headers(stream_id, (b"grpc-status", b"0"), end=True)
        server.http.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: 0})

    async with raw(answer) as (calls, made):
        await ended(calls, b"x")
        await until(lambda: not made[0].http.local_settings.max_concurrent_streams)
        heard = [Heard(), Heard()]
        for one in heard:
            await calls.begin(PATH, b"x", one)
        await until(lambda: all(one.status is not None for one in heard))
        assert {one.status for one in heard} == {(grpc.StatusCode.UNAVAILABLE, "the server allows no call")}


@table("num_calls", [1, 3])
async def test_messages_that_do_not_end_are_bounded_together(num_calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_calls, "MAX_UNFINISHED_BYTES", 1 << 20)
    piece = b"x" * 16_000

    def answer(server: Raw, stream_id: int) -> None:
        server.headers(stream_id)
        server.flush()
        length = (700_000 if num_calls > 1 else 1 << 24).to_bytes(4, "big")
        server.transport.write(frame(0, 0, stream_id, b"\0" + length) + frame(0, 0, stream_id, piece) * 40)

    async with raw(answer) as (calls, _):
        heard = [Heard() for _ in range(num_calls)]
        for one in heard:
            await calls.begin(PATH, b"x", one)
        await until(lambda: all(one.status is not None for one in heard))
        assert {one.status and one.status[0] for one in heard} == {grpc.StatusCode.INTERNAL}


def _garbage() -> Iterator[bytes]:
    chance = random.Random(3)
    for _ in range(200):
        kind = chance.choice((0, 1, 3, 4, 6, 7, 8, 9, 200))
        payload = chance.randbytes(chance.choice((0, 1, 4, 5, 8, 30)))
        stream_id = chance.choice((0, 1, 2, 3, 99))
        yield (
            len(payload).to_bytes(3, "big")
            + bytes((kind, chance.randrange(256)))
            + stream_id.to_bytes(4, "big")
            + payload
        )


async def test_frames_at_random_end_the_call_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    async def one(frame: bytes) -> None:
        def answer(server: Raw, stream_id: int) -> None:
            server.flush()
            server.transport.write(frame)
            server.transport.close()

        async with raw(answer) as (calls, _):
            assert (await ended(calls, b"x")).status is not None

    for frame in _garbage():
        await one(frame)
    assert caplog.records == []

"""Both ends of the native wire, with a front that says whatever a test wants."""

import asyncio
import math
import time
from pathlib import Path

import grpc
import msgspec
import pytest
from echo_worker import ask, tokens
from fronts import DESCRIPTION, Front, talking
from nested import NESTED_STEP
from streams import QueueSink, generate, no_pixels
from tables import table
from waiting import until

from saccade.connectors import session as connector
from saccade.connectors.context import ClientContext
from saccade.connectors.native import client
from saccade.connectors.native.client import WorkerClient
from saccade.errors import ImageTooLarge, InternalError, QueueFull, StartupError, WorkerFailed
from saccade.protocol.description import ModelFiles
from saccade.protocol.engine_load import STEP_TOKEN_BOUNDS, Load
from saccade.protocol.output import Failure, FinishReason, StepFrame, TokenDelta
from saccade.protocol.request import Abort, EngineRequest, GatewayCommand, ResetCaches
from saccade.transport import arrivals
from saccade.transport.backoff import Backoff
from saccade.transport.framing import Frames
from saccade.transport.gateway_streams import MAX_WAITING_FRAMES, GatewayStream, Refused
from saccade.transport.server import WorkerServer
from saccade.transport.wire import MAX_MESSAGE_BYTES, MAX_REPLY_BYTES, target

FOREIGN = msgspec.msgpack.encode(["a frame", "of another world"])
NOT_TEXT = msgspec.msgpack.encode(StepFrame([TokenDelta("ab", [1])])).replace(b"ab", b"\xff\xfe")


@pytest.fixture(params=["unix", "tcp"])
def bind(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where the worker listens: streams are gRPC's, or, on a Unix socket, their own."""
    return f"unix:{tmp_path}/w.sock" if request.param == "unix" else "127.0.0.1:0"


class Parrot(Front):
    """A front that answers a request with *frames*, in order; None stands for a good last delta."""

    def __init__(self, frames: list[bytes | None]) -> None:
        super().__init__()
        self.frames = frames

    def answer(self, connection: GatewayStream, command: GatewayCommand) -> None:
        if isinstance(command, EngineRequest):
            delta = TokenDelta(command.request_id, [len(command.token_ids)], FinishReason.LENGTH)
            for frame in self.frames:
                connection.send(msgspec.msgpack.encode(StepFrame([delta])) if frame is None else frame)


@table("malformed", [FOREIGN, NOT_TEXT, NESTED_STEP], ids=["external", "not text", "nested"])
async def test_malformed_frame_fails_the_stream_and_a_new_one_is_opened(bind: str, malformed: bytes) -> None:
    front = Parrot([malformed, None])
    async with talking(bind, front) as client:
        with pytest.raises(WorkerFailed):
            await tokens(client, ask("r", [1]))  # and nothing of what came behind it
        await until(lambda: client.ready)
        assert front.num_connections == 2
        front.frames = [None]
        assert await tokens(client, ask("again", [1, 1])) == [2]


async def test_long_frame_is_handed_over_in_turns_and_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(arrivals, "TURN_SECONDS", -1.0)
    frame = StepFrame([TokenDelta("r", [number]) for number in range(3)])
    front = Parrot([msgspec.msgpack.encode(frame), msgspec.msgpack.encode(StepFrame([TokenDelta("r", [3])])), None])
    turns: list[int] = []

    async def count() -> None:
        while True:
            turns.append(sink.arrived.qsize())
            await asyncio.sleep(0)

    async with talking(f"unix:{tmp_path}/w.sock", front) as client:
        sink = QueueSink(no_pixels)
        stream = client.generate(ask("r", [1]), sink)
        counting = asyncio.create_task(count())
        await until(lambda: sink.arrived.qsize() == 5)
        counting.cancel()
        await stream.close()
    assert [sink.arrived.get_nowait().token_ids for _ in range(4)] == [[0], [1], [2], [3]]  # type: ignore[union-attr]
    assert {1, 2, 3, 4} <= set(turns)


async def test_worker_is_ready_only_once_it_has_taken_the_stream(bind: str) -> None:
    class Refusing(Front):
        def open(self, frames: Frames | None = None) -> GatewayStream:
            super().open(frames)
            raise Refused(grpc.StatusCode.UNAVAILABLE, "The engine is starting.")

    front = Refusing()
    changes: list[bool] = []
    server = WorkerServer(front, bind)
    await server.start()
    client = WorkerClient(server.address, ClientContext(on_change=lambda client: changes.append(client.ready)))
    await client.start()
    await until(lambda: front.num_connections > 2)
    await client.close()
    await server.stop()
    assert changes == []


async def test_impossible_load_values_are_dropped(bind: str) -> None:
    """An older or newer worker counts steps by other bounds; what a faulty one says must not stay in sums."""
    sound = Load(num_waiting=3, draining=True, steps_by_tokens=(1, *[0] * len(STEP_TOKEN_BOUNDS)))
    table = {
        "sound": (sound, sound),
        "fewer bounds": (Load(num_running=2, steps_by_tokens=(1, 2)), Load(num_running=2)),
        "more bounds": (Load(num_running=2, steps_by_tokens=(1,) * 40), Load(num_running=2)),
        "steps below 0": (Load(steps_by_tokens=(-1, *[0] * len(STEP_TOKEN_BOUNDS))), Load()),
        "counts below 0": (Load(num_waiting=-4, num_blocks=-1, num_running=1), Load(num_running=1)),
        "seconds that no clock can have measured": (
            Load(
                batch_seconds_total=math.nan, encode_seconds_total=math.inf, network_seconds_total=-1.0, steps_total=5
            ),
            Load(steps_total=5),
        ),
    }
    front = Parrot([])
    async with talking(bind, front) as client:
        for name, (sent, kept) in table.items():
            front.frames = [msgspec.msgpack.encode(StepFrame([], load=sent)), None]
            async for _ in generate(client, ask(name, [1])):
                assert client.load == kept, name


async def test_a_worker_whose_description_cannot_be_is_not_used(tmp_path: Path) -> None:
    class Odd(Front):
        described = DESCRIPTION

        def describe(self, *, without_files: bool = False) -> bytes:
            self.num_described += 1
            return msgspec.msgpack.encode(self.described)

        num_described = 0

    front = Odd()
    server = WorkerServer(front, f"unix:{tmp_path}/w.sock")
    await server.start()
    client = WorkerClient(server.address)
    front.described = msgspec.structs.replace(DESCRIPTION, block_size=0)
    await client.start()
    try:
        for field in ("max_model_len", "max_num_seqs", "num_blocks"):
            num_described = front.num_described
            await until(lambda seen=num_described: front.num_described > seen + 1)
            assert client.description is None
            front.described = msgspec.structs.replace(DESCRIPTION, **{field: -1})
        front.described = DESCRIPTION
        await until(lambda: client.ready)
    finally:
        await client.close()
        await server.stop()


async def test_a_description_longer_than_any_model_has_does_not_arrive(bind: str) -> None:
    """gRPC ends the call at the message's length, before it has its bytes."""

    class Long(Front):
        files = ModelFiles(files={"tokenizer.json": bytes(MAX_REPLY_BYTES["Describe"])})

        def describe(self, *, without_files: bool = False) -> bytes:
            return msgspec.msgpack.encode(msgspec.structs.replace(DESCRIPTION, files=self.files))

    front = Long()
    server = WorkerServer(front, bind)
    await server.start()
    client = WorkerClient(server.address)
    try:
        await client.start()
        await until(lambda: "larger than max" in client.loss)
        front.files = ModelFiles(files={"tokenizer.json": bytes(64 << 20)})
        await until(lambda: client.ready)
    finally:
        await client.close()
        await server.stop()


async def test_worker_with_another_description_each_time_is_tried_more_and_more_slowly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    class Restless(Front):
        num_described = 0
        changes = True

        def describe(self, *, without_files: bool = False) -> bytes:
            self.num_described += self.changes
            return msgspec.msgpack.encode(msgspec.structs.replace(DESCRIPTION, model=f"m{self.num_described}"))

        def open(self, frames: Frames | None = None) -> GatewayStream:
            stream = super().open(frames)
            asyncio.get_running_loop().call_soon(stream.end)
            return stream

    async def wait(seconds: float) -> None:
        if asyncio.current_task().get_name().startswith("worker client"):  # type: ignore[union-attr]
            waits.append(seconds)
            seconds = 0.0
        await sleep(seconds)

    sleep = asyncio.sleep
    front = Restless()
    server = WorkerServer(front, f"unix:{tmp_path}/w.sock")
    await server.start()
    client = WorkerClient(server.address)
    monkeypatch.setattr(asyncio, "sleep", wait)
    try:
        await client.start()
        await until(lambda: len(waits) > 20)
        assert max(waits) == connector.MAX_CHANGE_SECONDS
        front.changes = False
        waits.clear()
        await until(lambda: len(waits) > 5)
        assert max(waits[2:]) == WorkerClient.LIMIT_SECONDS
    finally:
        await client.close()
        await server.stop()


async def test_worker_on_this_host_that_falls_silent_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "SILENT_SECONDS", 0.05)
    async with talking(f"unix:{tmp_path}/w.sock", Front()) as connected:
        with pytest.raises(WorkerFailed):
            await tokens(connected, ask("r", [1]))
        await until(lambda: connected.ready)


async def test_delta_of_an_unknown_request_is_dropped(bind: str) -> None:
    stray = msgspec.msgpack.encode(StepFrame([TokenDelta("stray", [9])], released=["not ours"]))
    async with talking(bind, Parrot([stray, None])) as client:
        assert await tokens(client, ask("r", [1])) == [1]


async def test_a_request_ends_with_its_last_sample(bind: str) -> None:
    ends = (FinishReason.LENGTH, FinishReason.STOP, FinishReason.ABORT)
    deltas = [TokenDelta("r", [index], reason, index=index) for index, reason in enumerate(ends)]
    front = Parrot([msgspec.msgpack.encode(StepFrame([delta])) for delta in deltas])
    async with talking(bind, front) as client:
        request = msgspec.structs.replace(ask("r", [1]), num_samples=3)
        assert await tokens(client, request) == [0, 1, 2]
        front.frames = [None]
        assert await tokens(client, ask("next", [1])) == [1]
    assert not any(isinstance(command, Abort) for command in front.commands)


async def test_a_sample_is_aborted_and_the_others_go_on(bind: str) -> None:
    front = Parrot([msgspec.msgpack.encode(StepFrame([TokenDelta("r", [7])]))])
    async with talking(bind, front) as client:
        sink = QueueSink(no_pixels)
        stream = client.generate(msgspec.structs.replace(ask("r", [1]), num_samples=2), sink)
        assert await sink.arrived.get() == TokenDelta("r", [7])
        stream.abort_sample(1)
        await until(lambda: len(front.commands) == 2)
        await stream.close()
        stream.abort_sample(0)
        await until(lambda: len(front.commands) == 3)
    assert front.commands[1:] == [Abort(request_id="r", index=1), Abort(request_id="r")]


async def test_caches_are_reset_over_the_wire(bind: str) -> None:
    front = Parrot([None])
    async with talking(bind, front) as client:
        assert client.description is not None
        assert not client.reset_caches(prefix=True, media=False)  # to a worker that does not know it, it would be fatal
        client.description = msgspec.structs.replace(client.description, takes_resets=True)
        assert client.reset_caches(prefix=True, media=False)
        assert client.reset_caches(prefix=False, media=True)
        assert await tokens(client, ask("r", [1])) == [1]
    assert front.commands[:2] == [ResetCaches(prefix=True), ResetCaches(media=True)]
    assert not client.reset_caches(prefix=True, media=True)


async def test_a_failure_ends_all_samples(bind: str) -> None:
    failed = TokenDelta("r", [], FinishReason.ERROR, failure=Failure("queue_full", "Too much."), index=1)
    front = Parrot([msgspec.msgpack.encode(StepFrame([failed]))])
    async with talking(bind, front) as client:
        with pytest.raises(QueueFull):
            await tokens(client, msgspec.structs.replace(ask("r", [1]), num_samples=2))
        front.frames = [None]
        assert await tokens(client, ask("next", [1])) == [1]
    assert not any(isinstance(command, Abort) for command in front.commands)


async def test_large_request_travels_inline(bind: str) -> None:
    front = Parrot([None])
    async with talking(bind, front) as client:
        request = ask("r", [1], "slot")
        pixels = bytes(32 << 20)
        media = (msgspec.structs.replace(request.media[0], slot=None, inline=pixels),)
        assert await tokens(client, msgspec.structs.replace(request, media=media)) == [1]
        sent = front.commands[0]
        assert isinstance(sent, EngineRequest)
        assert sent.media[0].inline == pixels
    assert len(pixels) < MAX_MESSAGE_BYTES


async def test_request_over_the_largest_message_harms_no_other(bind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.connectors.native.client.MAX_COMMAND_BYTES", 1 << 20)
    released: list[str] = []
    front = Parrot([])
    async with talking(bind, front, released.extend) as client:
        other = asyncio.create_task(tokens(client, ask("other", [1, 1])))
        await until(lambda: front.commands)
        request = ask("large", [1], "slot")
        inline = msgspec.structs.replace(request.media[0], slot=None, inline=bytes(1 << 20))
        with pytest.raises(ImageTooLarge):
            await tokens(client, msgspec.structs.replace(request, media=(*request.media, inline)))
        assert released == ["slot"]
        front.frames = [msgspec.msgpack.encode(StepFrame([TokenDelta("other", [7], FinishReason.LENGTH)])), None]
        assert await tokens(client, ask("next", [1])) == [1]
        assert await other == [7]
    assert front.num_connections == 1


async def test_request_id_in_use_is_refused(bind: str) -> None:
    released: list[str] = []
    async with talking(bind, Parrot([]), released.extend) as client:
        first = asyncio.create_task(tokens(client, ask("same", [1])))
        await asyncio.sleep(0)
        with pytest.raises(InternalError, match="same"):
            await tokens(client, ask("same", [1], "slot"))
        assert released == ["slot"]
        first.cancel()


async def test_a_slot_that_two_items_share_comes_back_twice_and_no_more(bind: str) -> None:
    """Each item holds it: free after the first, it could be another request's when the second release came."""
    released: list[list[str]] = []
    release = msgspec.msgpack.encode(StepFrame([], released=["slot"]))
    async with talking(
        bind, Parrot([release, release, release, None]), lambda names: released.append(list(names))
    ) as client:
        request = ask("r", [1], "slot")
        assert await tokens(client, msgspec.structs.replace(request, media=request.media * 2)) == [1]
        assert released == [["slot"], ["slot"]]


async def test_gateway_that_does_not_read_is_cut_off() -> None:
    connection = GatewayStream(1)
    for _ in range(MAX_WAITING_FRAMES + 2):
        connection.send(b"frame")
    for _ in range(MAX_WAITING_FRAMES):
        assert await connection.next() == b"frame"
    with pytest.raises(Refused) as refusal:
        await connection.next()
    assert refusal.value.status is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("url", "expected"),
    [("grpc://h:1", "h:1"), ("h:1", "h:1"), ("grpc://[::1]:2/", "[::1]:2"), ("unix:/a/b", "unix:/a/b")],
)
def test_target(url: str, expected: str) -> None:
    assert target(url) == expected


@table(
    "url",
    [
        "",
        "h",
        "http://h:1",
        "grpc://h:x",
        "grpc://:1",
        "grpc://h:1/path",
        "grpc://h:" + "0" * 5000 + "1",
        "grpc://h:65536",
    ],
)
def test_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(StartupError):
        target(url)


def test_backoff_doubles_and_begins_anew_after_a_healthy_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    backoff = Backoff(first_seconds=0.5, limit_seconds=2.0, healthy_seconds=60.0)
    assert [backoff.after_failure() for _ in range(4)] == [0.5, 1.0, 2.0, 2.0]
    backoff.started()
    now = 60.0
    assert backoff.after_failure() == 0.5

"""A worker with an engine of its own: what gateways see when the engine lives, fails, hangs and dies."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import grpc
import msgspec
import psutil
import pytest
from echo_worker import FAIL, STALL, WAIT_SECONDS, ask, command, connected, serving, tokens
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from nested import NESTED, NESTED_COMMAND
from streams import generate
from waiting import until

from saccade.errors import InvalidValue, StartupError, WorkerFailed, WorkerUnavailable
from saccade.protocol.output import FinishReason, StepFrame
from saccade.transport import shared_memory
from saccade.transport.access import Access
from saccade.transport.credentials import NO_CREDENTIALS
from saccade.transport.framing import framed
from saccade.transport.proto.worker_pb2 import DescribeRequest, GatewayFrame
from saccade.transport.wire import SERVICE_NAME, TAKEN, stream_path
from saccade.worker import service
from saccade.worker.engine_process import Timeouts
from saccade.worker.service import WorkerConfig, WorkerFront

pytestmark = pytest.mark.ci


async def test_requests_are_multiplexed_and_slots_come_back(tmp_path: Path) -> None:
    released: list[str] = []
    async with serving(tmp_path) as worker, connected(worker, on_released=released.extend) as client:
        assert client.description is not None
        assert client.description.model == "echo"
        prompts = [[n, n + 1, n + 2] for n in range(20)]
        answers = await asyncio.gather(*(tokens(client, ask(f"r{n}", ids, f"s{n}")) for n, ids in enumerate(prompts)))
        assert answers == prompts
        assert sorted(released) == sorted(f"s{n}" for n in range(20))
        await until(lambda: client.load is not None)


async def test_last_delta_says_why(tmp_path: Path) -> None:
    async with serving(tmp_path) as worker, connected(worker) as client:
        deltas = [delta async for delta in generate(client, ask("r", [1, 2]))]
        assert [delta.finish_reason for delta in deltas] == [None, FinishReason.LENGTH]


async def test_failure_of_one_request_is_raised_there_alone(tmp_path: Path) -> None:
    async with serving(tmp_path) as worker, connected(worker) as client:
        other = asyncio.create_task(tokens(client, ask("other", [1, 2, 3])))
        with pytest.raises(InvalidValue) as failure:
            await tokens(client, ask("bad", [FAIL]))
        assert failure.value.param == "messages"
        assert await other == [1, 2, 3]


async def test_iterator_closed_early_aborts(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    async with serving(tmp_path, journal=str(journal), step_seconds=0.01) as worker, connected(worker) as client:
        deltas = generate(client, ask("left", list(range(100))))
        await anext(deltas)
        await deltas.aclose()
        await until(journal.read_text)
        assert journal.read_text() == "abort left\n"
        assert await tokens(client, ask("next", [5])) == [5]


async def test_gateway_that_goes_away_is_hung_up(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    async with serving(tmp_path, journal=str(journal)) as worker:
        async with connected(worker) as client:
            stalled = asyncio.create_task(tokens(client, ask("r", [STALL])))
            await asyncio.sleep(0)
        with pytest.raises(WorkerFailed):
            await stalled
        await until(journal.read_text)
        assert journal.read_text() == "hangup 1\n"


async def test_killed_engine_fails_its_requests_and_is_replaced(tmp_path: Path) -> None:
    released: list[str] = []
    async with serving(tmp_path) as worker, connected(worker, on_released=released.extend) as client:
        first = worker.relay.engine.pid
        assert first is not None
        running = [asyncio.create_task(tokens(client, ask(f"r{n}", [STALL]))) for n in range(3)]
        await until(lambda: client.load is not None and client.load.num_running == 3)
        os.kill(first, signal.SIGKILL)
        for request in running:
            with pytest.raises(WorkerFailed):
                await request
        with pytest.raises(WorkerUnavailable):
            await tokens(client, ask("early", [1], "slot"))
        assert released == ["slot"]
        await until(lambda: client.ready)
        assert await tokens(client, ask("again", [7])) == [7]
        assert worker.relay.engine.pid != first


async def test_slots_of_a_killed_engine_come_back(tmp_path: Path) -> None:
    released: list[str] = []
    async with serving(tmp_path) as worker, connected(worker, on_released=released.extend) as client:
        assert worker.relay.engine.pid is not None
        os.kill(worker.relay.engine.pid, signal.SIGSTOP)
        request = asyncio.create_task(tokens(client, ask("r", [1], "slot")))
        await asyncio.sleep(0)
        os.kill(worker.relay.engine.pid, signal.SIGKILL)
        with pytest.raises(WorkerFailed):
            await request
        assert released == ["slot"]


async def test_engine_that_stands_still_is_killed_and_replaced(tmp_path: Path) -> None:
    async with serving(tmp_path, Timeouts(silence_seconds=1.0)) as worker, connected(worker) as client:
        first = worker.relay.engine.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        with pytest.raises(WorkerFailed):
            await tokens(client, ask("r", [1]))
        await until(lambda: client.ready)
        assert await tokens(client, ask("again", [7])) == [7]
        assert not psutil.pid_exists(first)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"failure": "The weights are damaged."}, "The weights are damaged."),
        ({"exit_code": 3}, "The engine ended with exit code 3."),
    ],
)
async def test_engine_that_cannot_start_ends_the_worker(tmp_path: Path, settings: dict, sentence: str) -> None:
    worker = WorkerFront(WorkerConfig(f"unix:{tmp_path}/w.sock", command(**settings)), lambda _: None)
    with pytest.raises(StartupError, match=sentence):
        await worker.run()


async def test_stopped_worker_leaves_no_engine(tmp_path: Path) -> None:
    async with serving(tmp_path) as worker:
        pid = worker.relay.engine.pid
        assert pid is not None
    assert not psutil.pid_exists(pid)


async def test_stopped_worker_drains(tmp_path: Path) -> None:
    states = health_pb2.HealthCheckResponse
    released: list[str] = []
    async with (
        serving(tmp_path, shutdown_timeout=WAIT_SECONDS, step_seconds=0.01) as worker,
        connected(worker, on_released=released.extend) as client,
        grpc.aio.insecure_channel(worker.server.bind) as channel,
    ):
        prompt = list(range(100))
        running = generate(client, ask("running", prompt))
        answer = (await anext(running)).token_ids
        worker.stop()
        await until(lambda: not client.ready)
        with pytest.raises(WorkerUnavailable, match="shutting down"):
            await tokens(client, ask("late", [1], "slot"))
        assert released == ["slot"]
        check = health_pb2_grpc.HealthStub(channel).Check
        assert (await check(health_pb2.HealthCheckRequest())).status == states.NOT_SERVING
        for call in (
            NO_CREDENTIALS.calls(channel).Describe(DescribeRequest()),
            NO_CREDENTIALS.calls(channel).Stream().read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await call
            assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
        assert [*answer, *[token async for delta in running for token in delta.token_ids]] == prompt


@pytest.mark.parametrize("ending", ["timeout", "second signal", "killed engine"])
async def test_drain_ends(tmp_path: Path, ending: str) -> None:
    timeout = 0.2 if ending == "timeout" else 3600.0
    async with serving(tmp_path, shutdown_timeout=timeout) as worker, connected(worker) as client:
        stalled = asyncio.create_task(tokens(client, ask("r", [STALL])))
        await until(lambda: client.load is not None and client.load.num_running)
        worker.stop()
        await until(lambda: not client.ready)
        if ending == "second signal":
            worker.stop()
        elif ending == "killed engine":
            assert worker.relay.engine.pid is not None
            os.kill(worker.relay.engine.pid, signal.SIGKILL)
        async with asyncio.timeout(WAIT_SECONDS):
            with pytest.raises(WorkerFailed):
                await stalled


async def test_address_in_use_is_an_operators_error(tmp_path: Path) -> None:
    async with serving(tmp_path) as worker:
        busy = WorkerFront(WorkerConfig("192.0.2.1:1", command(), access=Access(token="t" * 16)), lambda _: None)
        with pytest.raises(StartupError, match=r"192\.0\.2\.1:1: is the address in use"):
            await busy.run()
        assert worker.relay.serving.is_set()


async def read_to_the_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\x80\x04\x95 a pickle",
        msgspec.msgpack.encode({"type": "ab"}).replace(b"ab", b"\xff\xfe"),
        NESTED,
        NESTED_COMMAND,
    ],
    ids=["external", "not text", "nested", "nested field"],
)
async def test_malformed_frames_harm_nobody_else(tmp_path: Path, nonsense: bytes) -> None:
    async with serving(tmp_path) as worker, connected(worker) as client:
        async with grpc.aio.insecure_channel(worker.server.bind) as channel:
            media = [{"slot": {"name": "lent", "generation": "one"}}, "no item"]
            submit = {"type": "submit", "request_id": "half", "token_ids": "not a list", "media": media}
            half = msgspec.msgpack.encode(submit)
            call = NO_CREDENTIALS.calls(channel).Stream()
            await call.write(GatewayFrame(payload=half))
            assert (await call.read()).payload == TAKEN
            answer = msgspec.msgpack.decode((await call.read()).payload, type=StepFrame)
            while not answer.deltas:
                answer = msgspec.msgpack.decode((await call.read()).payload, type=StepFrame)
            assert answer.released == ["lent"]  # at once, not when the stream ends
            assert answer.deltas[0].request_id == "half"
            assert answer.deltas[0].finish_reason is FinishReason.ERROR
            await call.write(GatewayFrame(payload=nonsense))
            async with asyncio.timeout(WAIT_SECONDS):
                with pytest.raises(grpc.aio.AioRpcError) as refusal:
                    await read_to_the_end(call)
            assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await tokens(client, ask("well", [1])) == [1]


@pytest.mark.parametrize("nonsense", [b"\xc1", NESTED, NESTED_COMMAND], ids=["external", "nested", "nested field"])
async def test_malformed_frame_ends_its_own_stream_beside_grpc(tmp_path: Path, nonsense: bytes) -> None:
    surprises: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: surprises.append(context))
    async with serving(tmp_path) as worker, connected(worker) as client:
        running = generate(client, ask("running", [1, STALL]))
        assert (await anext(running)).token_ids == [1]
        reader, writer = await asyncio.open_unix_connection(stream_path(worker.server.bind))
        writer.write(framed(nonsense))
        async with asyncio.timeout(WAIT_SECONDS):
            await reader.read()  # to the end of the stream
        writer.close()
        assert await tokens(client, ask("well", [1])) == [1]
        await running.aclose()
    assert surprises == []


async def test_health_follows_the_engine(tmp_path: Path) -> None:
    states = health_pb2.HealthCheckResponse
    async with serving(tmp_path) as worker, grpc.aio.insecure_channel(worker.server.bind) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        seen = [(await watch.read()).status]
        if seen == [states.NOT_SERVING]:
            seen = [(await watch.read()).status]
        assert worker.relay.engine.pid is not None
        os.kill(worker.relay.engine.pid, signal.SIGKILL)
        seen += [(await watch.read()).status, (await watch.read()).status]
        assert seen == [states.SERVING, states.NOT_SERVING, states.SERVING]
        watch.cancel()


async def test_nothing_is_described_before_the_engine_is_ready(tmp_path: Path) -> None:
    async with serving(tmp_path) as worker, grpc.aio.insecure_channel(worker.server.bind) as channel:
        worker.relay.serving.clear()
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await NO_CREDENTIALS.calls(channel).Describe(DescribeRequest())
        assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_reflection_lists_the_service(tmp_path: Path) -> None:
    async with serving(tmp_path) as worker, grpc.aio.insecure_channel(worker.server.bind) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        names = {service.name for service in (await call.read()).list_services_response.service}
        assert {SERVICE_NAME, "grpc.health.v1.Health"} <= names


async def test_feed_ends_with_the_engine(tmp_path: Path) -> None:
    async with serving(tmp_path) as worker, connected(worker) as client:
        feed = client.kv_events(blocks=True)
        assert (await anext(feed)).snapshot
        assert worker.relay.engine.pid is not None
        os.kill(worker.relay.engine.pid, signal.SIGKILL)
        with pytest.raises(WorkerUnavailable):
            await anext(feed)
        # The client may not have noticed yet that its own stream has ended.
        await until(lambda: worker.relay.serving.is_set() and client.ready)
        again = client.kv_events(blocks=True)
        assert (await anext(again)).snapshot
        await again.aclose()


async def test_slots_of_a_dead_gateway_are_freed_when_its_stream_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # [eng] 18
    monkeypatch.setattr(service, "SWEEP_AFTER_SECONDS", 0.0)
    program = "from saccade.transport.shared_memory import SlotPool; import os\n"
    program += "print(SlotPool(1 << 20).acquire(1).ref.name, flush=True); os.kill(os.getpid(), 9)"
    died = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    name = (await died.communicate())[0].decode().strip()
    segment = shared_memory.FOLDER / name
    assert segment.exists()
    async with serving(tmp_path) as worker, connected(worker):
        pass
    await until(lambda: not segment.exists())


async def test_a_hang_up_shortly_before_the_end_starts_no_thread_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later: list[tuple[Any, ...]] = []
    loop = asyncio.get_running_loop()
    async with serving(tmp_path) as worker:
        connection = worker.relay.open()
        with monkeypatch.context() as patch:
            patch.setattr(loop, "call_later", lambda _, *callback: later.append(callback))
            worker.relay.hang_up(connection)
    await loop.shutdown_default_executor()
    assert len(later) == 1
    for callback, *arguments in later:
        callback(*arguments)


@pytest.mark.parametrize(("given", "found"), [(None, "10000"), ("7", "7")])
async def test_engines_threads_do_not_spin_for_long_unless_told_to(
    given: str | None, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    if given is not None:
        monkeypatch.setenv("GOMP_SPINCOUNT", given)
    async with serving(tmp_path) as worker:
        assert psutil.Process(worker.relay.engine.pid).environ()["GOMP_SPINCOUNT"] == found

"""Requests to an engine from within the worker's process."""

import asyncio
from typing import Any

import grpc
import msgspec
import pytest
from fronts import DESCRIPTION, Front
from waiting import until

from saccade.errors import InvalidValue, WorkerFailed, WorkerUnavailable
from saccade.protocol.description import Description
from saccade.protocol.engine_load import Load
from saccade.protocol.output import Failure, FinishReason, StepFrame, TokenDelta
from saccade.protocol.request import Abort, EngineRequest, SamplingParams
from saccade.transport.gateway_streams import GatewayStream, Refused
from saccade.worker.local_client import LocalClient

LENGTH = FinishReason.LENGTH


class Engine(Front):
    """Says nothing by itself; a test speaks on the newest of *opened*."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[GatewayStream] = []
        self.ready = True

    def described(self) -> Description:
        if not self.ready:
            raise Refused(grpc.StatusCode.UNAVAILABLE, "The engine is starting.")
        return DESCRIPTION

    def open(self, frames: Any = None) -> GatewayStream:
        self.described()
        self.opened.append(super().open(frames))
        return self.opened[-1]

    def say(self, *deltas: TokenDelta, load: Load | None = None) -> None:
        self.opened[-1].send(msgspec.msgpack.encode(StepFrame(list(deltas), load=load)))


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
async def client(engine: Engine) -> Any:
    client = LocalClient(engine, engine.described)
    yield client
    await client.close()


def request(name: str, num_samples: int = 1) -> EngineRequest:
    return EngineRequest(request_id=name, token_ids=[1], sampling=SamplingParams(max_tokens=9), num_samples=num_samples)


async def answer(client: LocalClient, asked: EngineRequest) -> list[TokenDelta]:
    return [delta async for delta in client.generate(asked)]


def begun(client: LocalClient, *asked: EngineRequest) -> list[asyncio.Task[list[TokenDelta]]]:
    return [asyncio.create_task(answer(client, each)) for each in asked]


async def test_each_request_gets_its_own_deltas(engine: Engine, client: LocalClient) -> None:
    tasks = begun(client, request("a"), request("b", num_samples=2))
    await until(lambda: len(engine.commands) == 2)
    last = [TokenDelta("b", [4], LENGTH, index=1), TokenDelta("a", [2], LENGTH), TokenDelta("b", [3], LENGTH)]
    engine.say(TokenDelta("a", [1]), TokenDelta("gone", [9]), load=Load(num_running=2))
    engine.say(*last)
    one, other = await asyncio.gather(*tasks)
    assert [delta.token_ids for delta in one] == [[1], [2]]
    assert [(delta.index, delta.token_ids) for delta in other] == [(1, [4]), (0, [3])]
    assert client.load.num_running == 2
    assert (client.num_open, engine.num_connections) == (0, 1)
    assert not any(isinstance(command, Abort) for command in engine.commands)


async def test_a_failure_ends_its_request_alone(engine: Engine, client: LocalClient) -> None:
    failing, other = begun(client, request("a"), request("b"))
    await until(lambda: len(engine.commands) == 2)
    failure = Failure("invalid_value", "A sentence.", "a_field")
    engine.say(TokenDelta("a", [], FinishReason.ERROR, failure=failure), TokenDelta("b", [3], LENGTH))
    with pytest.raises(InvalidValue) as caught:
        await failing
    assert (caught.value.message, caught.value.param) == ("A sentence.", "a_field")
    assert [delta.token_ids for delta in await other] == [[3]]


async def test_closing_aborts(engine: Engine, client: LocalClient) -> None:
    deltas = client.generate(request("a"))
    waiting = asyncio.ensure_future(anext(deltas))
    await until(lambda: engine.commands)
    engine.say(TokenDelta("a", [1]))
    await waiting
    await deltas.aclose()
    assert engine.commands[1:] == [Abort(request_id="a")]


async def test_ended_engine_fails_open_requests_and_the_next_is_found(engine: Engine, client: LocalClient) -> None:
    (task,) = begun(client, request("a"))
    await until(lambda: engine.commands)
    engine.say(load=Load(num_running=1))
    engine.ready = False
    engine.opened[0].end(Refused(grpc.StatusCode.UNAVAILABLE, "The engine was killed."))
    with pytest.raises(WorkerFailed, match="killed"):
        await task
    assert client.load == Load()
    with pytest.raises(WorkerUnavailable, match="starting"):
        await answer(client, request("b"))
    engine.ready = True
    (task,) = begun(client, request("c"))
    await until(lambda: len(engine.opened) == 2)
    engine.say(TokenDelta("c", [5], LENGTH))
    assert [delta.token_ids for delta in await task] == [[5]]
    assert engine.opened[0] in engine.left


async def test_a_feed_that_is_not_read_says_so(engine: Engine, client: LocalClient) -> None:
    feed = client.block_events()
    waiting = asyncio.ensure_future(anext(feed))
    await until(lambda: engine.watchers)
    engine.watchers[0].end(Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "This stream is not read."))
    with pytest.raises(WorkerFailed, match="not read"):
        await waiting
    assert engine.left == [engine.watchers[0]]


async def test_closing_fails_open_requests(engine: Engine, client: LocalClient) -> None:
    (task,) = begun(client, request("a"))
    await until(lambda: engine.commands)
    await client.close()
    with pytest.raises(WorkerFailed):
        await task

"""An attempt between a connector, which pushes, and an output, which may be slow."""

import asyncio

import pytest
from echo_worker import ask
from streams import no_chat, no_pixels
from stub_worker import StubWorker
from tables import table

from saccade.connectors.sink import Sink, Stream
from saccade.errors import RequestTimeout, WorkerFailed
from saccade.fleet.attempt import MAX_WAITING_BYTES, SURE_DELTAS, Attempt
from saccade.fleet.dispatch import Dispatcher
from saccade.fleet.placement import Placement
from saccade.fleet.pool import WorkerPool
from saccade.protocol.output import FinishReason, TokenDelta
from saccade.protocol.request import EngineRequest


class ManualWorker(StubWorker):
    """A worker whose deltas the test pushes to *sink*, and the stream of its one request."""

    sink: Sink
    num_closed = 0

    def generate(self, request: EngineRequest, sink: Sink, chat: object = None) -> Stream:
        """Keep *sink*."""
        self.sink = sink
        return self

    def abort_sample(self, index: int) -> None:
        """Nothing runs."""

    async def close(self) -> None:
        """Count the call."""
        self.num_closed += 1


class SlowOutput:
    """Takes one delta; then no more until *reads* is set. Whole after a delta with a finish reason."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.is_whole = False
        self.reads = asyncio.Event()

    def take(self, delta: TokenDelta) -> bool:
        """Take *delta*."""
        self.token_ids += delta.token_ids
        self.is_whole = delta.finish_reason is not None
        return self.reads.is_set()

    async def flush(self) -> None:
        """Wait."""
        await self.reads.wait()


class Subject:
    """An attempt at a manual worker, with a slow output."""

    def __init__(self, slot: str | None = None) -> None:
        self.worker, self.output = ManualWorker("manual"), SlowOutput()
        self.num_waiting_bytes = 0
        self.num_counts = 0
        self.has_room = True
        self.released: list[str] = []
        request = ask("r", [1], *([slot] if slot else []))
        dispatcher = Dispatcher(WorkerPool((), self.released.extend))
        placement = Placement(self.worker, "uint8")
        self.attempt = Attempt(
            dispatcher.sender, placement, request, self.output, self.count, no_pixels, lambda: None, no_chat
        )

    def count(self, num_bytes: int) -> bool:
        """Count bytes that wait."""
        self.num_waiting_bytes += num_bytes
        self.num_counts += num_bytes > 0
        return self.has_room

    async def begin(self) -> asyncio.Task[None]:
        """Run the attempt until its request is sent."""
        running = asyncio.create_task(self.attempt.run())
        await asyncio.sleep(0)
        return running


async def test_deltas_wait_while_the_client_is_slow_and_are_counted() -> None:
    subject = Subject()
    running = await subject.begin()
    sink = subject.worker.sink
    for token_id in (1, 2, 3):
        sink.delta(TokenDelta("r", [token_id]))
    assert subject.output.token_ids == [1]
    assert subject.num_waiting_bytes > 0
    await asyncio.sleep(0)  # the attempt waits for the output now
    sink.delta(TokenDelta("r", [4], FinishReason.STOP))
    sink.delta(TokenDelta("r", [5]))  # sent before the worker had the abort
    subject.output.reads.set()
    await running
    assert subject.output.token_ids == [1, 2, 3, 4]
    assert subject.num_waiting_bytes == 0
    assert subject.worker.num_closed == 1


async def test_deltas_that_go_on_waiting_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, each time that the client read a little, all that still waited was encoded and counted again."""
    subject = Subject()
    running = await subject.begin()
    for token_id in range(100):
        subject.worker.sink.delta(TokenDelta("r", [token_id]))
    subject.worker.sink.delta(TokenDelta("r", [100], FinishReason.STOP))
    monkeypatch.setattr(subject.output.reads, "is_set", lambda: False)  # full again after each delta
    subject.output.reads.set()
    await running
    assert subject.output.token_ids == [*range(101)]
    assert subject.num_counts == 100
    assert subject.num_waiting_bytes == 0


@table("has_room", [True, False])
async def test_deltas_over_their_bound_end_the_work_and_are_dropped(has_room: bool) -> None:
    """Before, only the engine's speed bounded them."""
    subject = Subject()
    subject.has_room = has_room
    running = await subject.begin()
    sink = subject.worker.sink
    sink.delta(TokenDelta("r", [1]))
    for _ in range(SURE_DELTAS):
        sink.delta(TokenDelta("r", [2]))
    await asyncio.sleep(0)
    assert subject.worker.num_closed == 0
    many = [2] * (1 if not has_room else MAX_WAITING_BYTES)
    for _ in range(3):
        sink.delta(TokenDelta("r", many))
    await asyncio.sleep(0)
    assert subject.worker.num_closed == 1
    assert subject.num_waiting_bytes == 0
    sink.fail(WorkerFailed("says that it was aborted"))
    assert not running.done()
    subject.output.reads.set()
    with pytest.raises(RequestTimeout, match="read too slowly"):
        await running
    assert subject.output.token_ids == [1]
    assert subject.worker.num_closed == 1


async def test_error_comes_after_the_deltas_that_wait() -> None:
    subject = Subject()
    running = await subject.begin()
    subject.worker.sink.delta(TokenDelta("r", [1]))
    subject.worker.sink.delta(TokenDelta("r", [2]))
    subject.worker.sink.fail(WorkerFailed("died"))
    await asyncio.sleep(0)
    assert not running.done()
    subject.output.reads.set()
    with pytest.raises(WorkerFailed, match="died"):
        await running
    assert subject.output.token_ids == [1, 2]


async def test_nothing_is_taken_after_the_end() -> None:
    subject = Subject()
    subject.output.reads.set()
    running = await subject.begin()
    sink = subject.worker.sink
    sink.delta(TokenDelta("r", [1], FinishReason.STOP))
    sink.delta(TokenDelta("r", [2]))
    sink.fail(WorkerFailed("the worker went away"))
    await running
    sink.pixels_wanted([0], "manual", lambda _: None)
    assert subject.output.token_ids == [1]
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("pixels")]


async def test_client_that_leaves_closes_the_stream() -> None:
    subject = Subject()
    running = await subject.begin()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert subject.worker.num_closed == 1
    subject.worker.sink.delta(TokenDelta("r", [1]))
    assert subject.output.token_ids == []


async def test_slots_of_a_request_that_was_never_sent_come_back() -> None:
    subject = Subject("slot")
    subject.attempt.release_unsent()
    assert subject.released == ["slot"]

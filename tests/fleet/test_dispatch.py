"""WorkerPool and Dispatcher over real workers with echo engines."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest
from echo_worker import STALL, ask, serving
from fronts import DESCRIPTION
from prometheus_client import CollectorRegistry
from streams import stream
from stub_worker import StubWorker
from tables import table
from waiting import until

from saccade.connectors.sink import Sink
from saccade.errors import (
    InvalidValue,
    ModelNotFound,
    QueueFull,
    SaccadeError,
    WorkerFailed,
    WorkerUnavailable,
)
from saccade.fleet import dispatch
from saccade.fleet.breaker import CLOSED, FAILURES, FIRST_SECONDS
from saccade.fleet.cost import Policy, WorkInFlight
from saccade.fleet.dispatch import Dispatcher
from saccade.fleet.index import BlockIndex
from saccade.fleet.lookup import Lookup, Overlaps, Targets
from saccade.fleet.metrics import DispatchCollector
from saccade.fleet.placement import Placement
from saccade.fleet.pool import Model, WorkerPool
from saccade.fleet.prompt import Prompt, media_runs
from saccade.fleet.router import Router
from saccade.fleet.settings import DEFAULT_LIMITS, DispatchLimits
from saccade.identity.blocks import MediaRun
from saccade.protocol.engine_load import Load
from saccade.protocol.exactness import Exactness
from saccade.protocol.media import Span
from saccade.protocol.output import FinishReason, TokenDelta
from saccade.protocol.request import MAX_PRIORITY, EngineRequest, MediaPixels
from saccade.transport import shared_memory


def folders(root: Path, *names: str) -> list[Path]:
    made = [root / name for name in names]
    for folder in made:
        folder.mkdir()
    return made


def url(folder: Path) -> str:
    return f"unix:{folder}/w.sock"


@contextlib.asynccontextmanager
async def fleet_of(*places: Path, released: list[str]) -> AsyncIterator[WorkerPool]:
    worker_pool = WorkerPool([url(place) for place in places], released.extend)
    await worker_pool.start()
    try:
        yield worker_pool
    finally:
        await worker_pool.close()


async def answer(dispatcher: Dispatcher, request: EngineRequest, model: str = "echo") -> list[int]:
    async with dispatcher.place(model, Prompt(request.token_ids)) as placement:
        return [token async for delta in stream(dispatcher, placement, request) for token in delta.token_ids]


async def test_fleet_follows_its_workers(tmp_path: Path) -> None:
    (a,) = folders(tmp_path, "a")
    seen: list[Model] = []
    async with fleet_of(a, released=[]) as worker_pool:
        worker_pool.on_model(seen.append)
        assert not worker_pool.ready
        with pytest.raises(WorkerUnavailable):
            worker_pool.model("echo")
        async with serving(a):
            await until(lambda: worker_pool.ready)
            assert [model.name for model in seen] == ["echo"]
            assert seen[0].description.files.files == {"config.json": b"{}"}
            assert [model.name for model in worker_pool.models()] == ["echo"]
            with pytest.raises(ModelNotFound, match="served: echo") as failure:
                worker_pool.model("other")
            assert failure.value.param == "model"
        await until(lambda: not worker_pool.ready)
        with pytest.raises(WorkerUnavailable):
            worker_pool.model("echo")
        async with serving(a):
            await until(lambda: worker_pool.ready)
        async with serving(a, fingerprint="g"):
            await until(lambda: worker_pool.ready and worker_pool.model("echo").description.fingerprint == b"g")
        # Other weights have the same files.
        assert len(seen) == 1


async def test_work_goes_where_least_is_in_flight(tmp_path: Path) -> None:
    a, b = folders(tmp_path, "a", "b")
    async with serving(a), serving(b), fleet_of(a, b, released=[]) as worker_pool:
        await until(lambda: all(client.state.ready for client in worker_pool.clients))
        dispatcher = Dispatcher(worker_pool)
        stalled = [asyncio.create_task(answer(dispatcher, ask(f"r{n}", [STALL]))) for n in range(4)]
        await until(
            lambda: [client.state.load and client.state.load.num_running for client in worker_pool.clients] == [2, 2]
        )
        assert dispatcher.num_requests == 4
        for task in stalled:
            task.cancel()
        await asyncio.gather(*stalled, return_exceptions=True)
        assert dispatcher.num_requests == 0
        await until(
            lambda: [client.state.load and client.state.load.num_running for client in worker_pool.clients] == [0, 0]
        )
        assert await answer(dispatcher, ask("next", [1, 2])) == [1, 2]


async def test_worker_with_another_model_of_the_same_name_gets_no_work(tmp_path: Path) -> None:
    a, b = folders(tmp_path, "a", "b")
    async with serving(a), serving(b, fingerprint="g"), fleet_of(a, b, released=[]) as worker_pool:
        await until(lambda: all(client.state.ready for client in worker_pool.clients))
        assert [worker.url for worker in worker_pool.model("echo").workers] == [url(a)]


async def test_models_are_told_apart_by_name(tmp_path: Path) -> None:
    a, b = folders(tmp_path, "a", "b")
    async with serving(a), serving(b, model="other"), fleet_of(a, b, released=[]) as worker_pool:
        await until(lambda: all(client.state.ready for client in worker_pool.clients))
        assert [model.name for model in worker_pool.models()] == ["echo", "other"]
        assert [worker.url for worker in worker_pool.model("other").workers] == [url(b)]


async def test_alias_means_its_model_and_a_models_own_name_wins(tmp_path: Path) -> None:
    a, b = folders(tmp_path, "a", "b")
    names = {"model": "one", "aliases": ["first", "two"]}
    async with serving(a, **names), serving(b, model="two"), fleet_of(a, b, released=[]) as worker_pool:
        await until(lambda: all(client.state.ready for client in worker_pool.clients))
        assert [worker_pool.model(name).name for name in ("one", "first", "two")] == ["one", "one", "two"]
        assert [(model.name, worker_pool.aliases(model.name)) for model in worker_pool.models()] == [
            ("one", ("first",)),
            ("two", ()),
        ]


@pytest.mark.parametrize(
    ("model", "place", "error"),
    [("other", "a", ModelNotFound), ("echo", "nowhere", WorkerUnavailable)],
)
async def test_without_a_worker_there_is_no_place(
    tmp_path: Path, model: str, place: str, error: type[SaccadeError]
) -> None:
    (a,) = folders(tmp_path, "a")
    async with serving(a), fleet_of(tmp_path / place, released=[]) as worker_pool:
        await until(lambda: worker_pool.ready or place == "nowhere")
        with pytest.raises(error):
            await answer(Dispatcher(worker_pool), ask("r", [1]), model)


async def test_slots_come_back_when_the_worker_is_gone_before_the_request_is_sent(tmp_path: Path) -> None:
    released: list[str] = []
    (a,) = folders(tmp_path, "a")
    async with fleet_of(a, released=released) as worker_pool:
        dispatcher = Dispatcher(worker_pool)
        async with contextlib.AsyncExitStack() as held:
            async with serving(a, shm_namespace=shared_memory.namespace()):
                await until(lambda: worker_pool.ready)
                placement = await held.enter_async_context(dispatcher.place("echo", Prompt([1])))
            await until(lambda: not worker_pool.ready)
            with pytest.raises(WorkerUnavailable):
                async with contextlib.aclosing(stream(dispatcher, placement, ask("r", [1], "slot", "slot"))) as deltas:
                    await anext(deltas)
        assert released == ["slot", "slot"]
        assert dispatcher.num_requests == 0


@pytest.mark.parametrize(
    ("place", "same_machine"),
    [
        (shared_memory.namespace(), True),  # of another make, it does not say which user it runs as
        (shared_memory.readers(), True),
        (f"{shared_memory.namespace()}:{os.geteuid() + 1}", False),
        ("elsewhere", False),
    ],
)
async def test_pixels_travel_inline_to_another_machine_or_user(tmp_path: Path, place: str, same_machine: bool) -> None:
    (a,) = folders(tmp_path, "a")
    pool = shared_memory.SlotPool(1 << 20)
    pixels = bytes(range(48))
    slot = pool.acquire(len(pixels))
    assert slot is not None
    with shared_memory.open_slot(slot.ref) as memory:
        memory[:] = pixels
    request = ask("r", [1], slot.ref.name, generation=slot.ref.generation)
    journal = tmp_path / "journal"
    worker_pool = WorkerPool([url(a)], lambda names: [pool.release(name) for name in names])
    await worker_pool.start()
    try:
        async with serving(a, shm_namespace=place, journal=str(journal)):
            await until(lambda: worker_pool.ready)
            assert await answer(Dispatcher(worker_pool), request) == [1]
            assert journal.read_text() == ("" if same_machine else f"inline {pixels.hex()}\n")
            assert pool.num_used == 0
    finally:
        await worker_pool.close()
        pool.close()


async def ask_for_an_image(
    brought: list[tuple[MediaPixels, ...]], request: EngineRequest, sink: Sink
) -> AsyncGenerator[TokenDelta, None]:
    """Ask for the pixels of the third image before the answer."""
    arrived = asyncio.get_running_loop().create_future()
    sink.pixels_wanted([2], "asking", arrived.set_result)
    brought.append(await arrived)
    yield TokenDelta(request.request_id, [1], FinishReason.STOP)


@pytest.mark.parametrize("same_machine", [True, False])
async def test_pixels_that_are_brought_later_travel_the_same_way(tmp_path: Path, same_machine: bool) -> None:  # F5
    (a,) = folders(tmp_path, "a")
    pool = shared_memory.SlotPool(1 << 20)
    slot = pool.acquire(3)
    assert slot is not None
    with shared_memory.open_slot(slot.ref) as memory:
        memory[:] = b"abc"

    async def supply(media: Sequence[int]) -> tuple[MediaPixels, ...]:
        return tuple(MediaPixels(index, slot.ref) for index in media)

    worker_pool = WorkerPool([url(a)], lambda names: [pool.release(name) for name in names])
    brought: list[tuple[MediaPixels, ...]] = []
    await worker_pool.start()
    try:
        async with serving(a, shm_namespace=shared_memory.namespace() if same_machine else "elsewhere"):
            await until(lambda: worker_pool.ready)
            asking = StubWorker("asking", worker_pool.clients[0].state, partial(ask_for_an_image, brought))
            placement = Placement(asking, "uint8")
            async for _ in stream(Dispatcher(worker_pool), placement, ask("r", [1]), supply):
                pass
        assert brought == [((MediaPixels(2, slot.ref) if same_machine else MediaPixels(2, inline=b"abc")),)]
        assert pool.num_used == same_machine  # it comes back from the worker
    finally:
        await worker_pool.close()
        pool.close()


async def test_engine_that_dies_fails_the_request_and_its_work_is_forgotten(tmp_path: Path) -> None:
    (a,) = folders(tmp_path, "a")
    async with serving(a) as worker, fleet_of(a, released=[]) as worker_pool:
        await until(lambda: worker_pool.ready)
        dispatcher = Dispatcher(worker_pool)
        request = asyncio.create_task(answer(dispatcher, ask("r", [STALL])))
        await until(lambda: worker_pool.clients[0].state.load and worker_pool.clients[0].state.load.num_running)
        worker.relay.on_lost("The engine is gone.")
        with pytest.raises(WorkerFailed):
            await request
        assert dispatcher.num_requests == 0


class Scripted(StubWorker):
    """A worker that is ready, and answers by what is next in *script*: an error to raise, a token to send."""

    def __init__(self, url: str, max_num_seqs: int = 1) -> None:
        super().__init__(url, play=self.answer)
        self.become(
            description=msgspec.structs.replace(DESCRIPTION, model="echo", max_num_seqs=max_num_seqs),
            exactness=Exactness("NONE", "a script says nothing of caches"),
        )
        self.script: list[Exception | int] = []

    async def answer(self, request: EngineRequest, _: Sink) -> AsyncGenerator[TokenDelta, None]:
        for step in self.script:
            if isinstance(step, Exception):
                raise step
            yield TokenDelta(request.request_id, [step])
        yield TokenDelta(request.request_id, [0], FinishReason.STOP)


def scripted(
    *urls: str,
    policy: Policy = "round_robin",
    limits: DispatchLimits = DEFAULT_LIMITS,
    max_num_seqs: int = 1,
    lookup: Lookup | None = None,
):
    """Scripted workers by url, the router, and a dispatcher to them."""
    worker_pool = WorkerPool((), lambda _: None)
    workers = {url: Scripted(url, max_num_seqs) for url in urls}
    for worker in workers.values():
        worker_pool.add(worker)
        worker.on_change = worker_pool.changed
    router = Router(policy, BlockIndex(1 << 20), Random(0))
    return workers, router, Dispatcher(worker_pool, router, limits=limits, lookup=lookup)


async def test_a_worker_that_keeps_failing_is_passed_over_until_a_trial_succeeds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    workers, router, dispatcher = scripted("a", "b")
    workers["a"].script = [WorkerFailed("its engine is broken")]
    for number in range(2 * FAILURES):
        with contextlib.suppress(WorkerFailed):
            await answer(dispatcher, ask(f"r{number}", [1]))
    assert "worker a gets no requests for 1 s: 3 requests in a row" in caplog.text
    report = router.breakers.report("a", time.monotonic())
    assert (report.state, "its engine is broken" in report.reason) == ("open", True)
    chosen = []
    for _ in range(4):
        async with dispatcher.place("echo", Prompt([1])) as placement:
            chosen.append(placement.worker.url)
    assert set(chosen) == {"b"}
    workers["a"].script = []
    await until(lambda: router.breakers.allows("a", time.monotonic()))
    for number in range(2):
        await answer(dispatcher, ask(f"trial{number}", [1]))
    assert router.breakers.report("a", time.monotonic()) == CLOSED


async def test_a_breaker_never_takes_the_last_worker_away() -> None:
    workers, router, dispatcher = scripted("a")
    workers["a"].script = [WorkerUnavailable("away")]
    for number in range(FAILURES):
        with pytest.raises(WorkerUnavailable):
            await answer(dispatcher, ask(f"r{number}", [1]))
    assert not router.breakers.allows("a", time.monotonic())
    async with dispatcher.place("echo", Prompt([1])) as placement:
        assert placement.worker.url == "a"


@pytest.mark.parametrize(
    "script", [[InvalidValue("wrong")], [1, WorkerFailed("after the first token")], [QueueFull("full")]]
)
async def test_breaker_ignores_failures_that_are_not_the_workers(
    script: list[Exception | int],
) -> None:
    workers, router, dispatcher = scripted("a", "b")
    workers["a"].script = workers["b"].script = script
    for number in range(3 * FAILURES):
        with pytest.raises(SaccadeError):
            await answer(dispatcher, ask(f"r{number}", [1]))
    assert all(router.breakers.report(url, 0.0) == CLOSED for url in workers)


async def test_pixels_that_the_gateway_could_not_supply_are_not_the_workers_failure() -> None:
    workers, router, dispatcher = scripted("a")

    async def supply(_: Sequence[int]) -> tuple[MediaPixels, ...]:
        raise WorkerUnavailable("preparing it again took too long")

    asking = StubWorker("asking", workers["a"].state, partial(ask_for_an_image, []))
    for number in range(FAILURES):
        placement = Placement(asking, "uint8")
        with pytest.raises(WorkerUnavailable):
            await anext(stream(dispatcher, placement, ask(f"r{number}", [1]), supply))
    assert router.breakers.report("asking", 0.0) == CLOSED


async def test_workers_that_are_full_or_excluded_are_passed_over() -> None:
    _, _, dispatcher = scripted("a", "b", limits=DispatchLimits(worker_queue=0), max_num_seqs=2)
    async with contextlib.AsyncExitStack() as held:
        places = [
            await held.enter_async_context(dispatcher.place("echo", Prompt([1], excluded={"b"}))) for _ in range(2)
        ]
        places += [await held.enter_async_context(dispatcher.place("echo", Prompt([1]))) for _ in range(2)]
        assert [place.worker.url for place in places] == ["a", "a", "b", "b"]
        waiting = asyncio.create_task(answer(dispatcher, ask("r", [1])))
        await until(lambda: dispatcher.num_waiting)
        registry = CollectorRegistry()
        registry.register(DispatchCollector(dispatcher))
        assert registry.get_sample_value("saccade_router_queue_pending_requests") == 1
    assert await waiting == [0]
    assert dispatcher.num_requests == 0
    with pytest.raises(WorkerUnavailable, match="No other worker"):
        async with dispatcher.place("echo", Prompt([1], excluded={"a", "b"})):
            pass


async def test_request_waits_or_is_refused_if_all_workers_are_full() -> None:
    limits = DispatchLimits(worker_queue=1, max_waiting=1, wait_seconds=0.3)
    _, _, dispatcher = scripted("a", "b", limits=limits)
    async with contextlib.AsyncExitStack() as held:
        for _ in range(4):
            await held.enter_async_context(dispatcher.place("echo", Prompt([1])))
        waiting = asyncio.create_task(answer(dispatcher, ask("r", [1])))
        await until(lambda: dispatcher.num_waiting)
        with pytest.raises(QueueFull, match="Too many requests to busy workers"):
            await answer(dispatcher, ask("s", [1]))
        with pytest.raises(QueueFull, match="Other requests to busy workers"):
            await waiting
    assert dispatcher.num_waiting == dispatcher.num_requests == 0


async def test_prompt_that_only_a_full_worker_takes_holds_up_no_other() -> None:
    workers, _, dispatcher = scripted("a", "b", limits=DispatchLimits(worker_queue=0, wait_seconds=5.0))
    workers["a"].become(description=msgspec.structs.replace(workers["a"].state.description, max_model_len=10))
    long = Prompt([1] * 10)

    async def place_of(prompt: Prompt) -> str:
        async with dispatcher.place("echo", prompt) as placement:
            return placement.worker.url

    async with dispatcher.place("echo", long):
        waiting = asyncio.create_task(place_of(long))
        await until(lambda: dispatcher.num_waiting)
        assert await place_of(Prompt([1])) == "a"
        assert not waiting.done()
    assert await waiting == "b"


class SlowLookup:
    """A lookup that finds nothing, and waits before that."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()

    async def overlaps(self, targets: Targets, _: object, images: Sequence[bytes]) -> Overlaps:
        await self.go_on.wait()
        return Overlaps.unknown(len(targets.names), len(images))


async def test_place_is_given_once_while_its_request_looks_up() -> None:
    lookup = SlowLookup()
    _, _, dispatcher = scripted("a", "b", limits=DispatchLimits(worker_queue=0), lookup=lookup)
    waiting = [asyncio.create_task(answer(dispatcher, ask(f"r{number}", [1]))) for number in range(4)]
    await until(lambda: dispatcher.num_waiting == 2)
    # One that leaves while it looks up gives its place to the next.
    waiting[0].cancel()
    await until(lambda: dispatcher.num_waiting == 1)
    lookup.go_on.set()
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert answers[1:] == [[0]] * 3
    assert dispatcher.num_requests == 0


async def test_requests_wait_no_longer_if_no_worker_is_left() -> None:
    workers, _, dispatcher = scripted("a", "b", limits=DispatchLimits(worker_queue=0))
    async with dispatcher.place("echo", Prompt([1])), dispatcher.place("echo", Prompt([1])):
        waiting = [asyncio.create_task(answer(dispatcher, ask(f"r{number}", [1]))) for number in range(2)]
        await until(lambda: dispatcher.num_waiting == 2)
        for worker in workers.values():
            worker.become(ready=False)
        answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(answer) for answer in answers] == [WorkerUnavailable] * 2


async def test_place_that_comes_without_an_event_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "ADVANCE_SECONDS", 0.01)
    _, router, dispatcher = scripted("a", "b", limits=DispatchLimits(worker_queue=0))
    # A breaker lets a trial through soon.
    for _ in range(FAILURES):
        router.breakers.failed("a", "", time.monotonic() - 0.8 * FIRST_SECONDS)
    async with dispatcher.place("echo", Prompt([1])):
        waiting = asyncio.create_task(answer(dispatcher, ask("r", [1])))
        await until(lambda: dispatcher.num_waiting)
        assert await waiting == [0]


async def test_one_of_several_tenants_leaves_waiting_places_to_others() -> None:  # F11
    limits = DispatchLimits(worker_queue=0, max_waiting=4, client_share=0.75)
    _, _, dispatcher = scripted("a", "b", limits=limits)
    one, other = (Prompt([1], tenant=name) for name in (b"one", b"other"))

    async def serve(prompt: Prompt) -> None:
        async with dispatcher.place("echo", prompt):
            pass

    async with dispatcher.place("echo", one), dispatcher.place("echo", one):
        waiting = [asyncio.create_task(serve(one)) for _ in range(3)]
        await until(lambda: dispatcher.num_waiting == 3)
        with pytest.raises(QueueFull, match="Your share"):
            await serve(one)
        waiting.append(asyncio.create_task(serve(other)))
        await until(lambda: dispatcher.num_waiting == 4)
    await asyncio.gather(*waiting)


async def test_new_worker_serves_waiting_requests() -> None:
    limits = DispatchLimits(worker_queue=0, max_waiting=1)
    workers, _, dispatcher = scripted("a", "b", "c", limits=limits)
    workers["c"].become(ready=False)
    async with dispatcher.place("echo", Prompt([1])), dispatcher.place("echo", Prompt([1])):
        waiting = asyncio.create_task(answer(dispatcher, ask("r", [1])))
        await until(lambda: dispatcher.num_waiting)
        workers["c"].become(ready=True)
        assert await waiting == [0]


async def test_a_worker_that_is_alone_gets_everything() -> None:
    _, _, dispatcher = scripted("a", limits=DispatchLimits(worker_queue=0, max_waiting=0))
    async with contextlib.AsyncExitStack() as held:
        for _ in range(9):
            await held.enter_async_context(dispatcher.place("echo", Prompt([1])))
        assert dispatcher.num_requests == 9
    [placed] = [one for one in DispatchCollector(dispatcher).collect() if one.name == "saccade_router_requests"]
    assert [(one.labels, one.value) for one in placed.samples] == [({"worker": "a"}, 9)]


async def test_tenants_take_turns_at_a_worker_that_is_alone() -> None:  # F11
    _, _, dispatcher = scripted("a", limits=DispatchLimits(lone_worker_queue=1), max_num_seqs=1)
    one, other = (Prompt([1], tenant=name) for name in (b"one", b"other"))
    order: list[bytes] = []

    async def serve(prompt: Prompt) -> None:
        async with dispatcher.place("echo", prompt):
            order.append(prompt.tenant)

    async with dispatcher.place("echo", one):
        async with dispatcher.place("echo", one):
            waiting = [asyncio.create_task(serve(prompt)) for prompt in (one, one, other)]
            await until(lambda: dispatcher.num_waiting == 3)
        await asyncio.gather(*waiting)
    assert order == [b"other", b"one", b"one"]


ORDERS = {1.0: ["a4", "a3", "b5", "a1", "b2", "b6"], 0.75: ["b5", "a4", "b2", "a3", "b6", "a1"]}
"""In which order requests begin by the share of one tenant, which is 1 without several."""


@table("share", ORDERS)
async def test_priorities_order_the_requests_of_one_tenant(share: float) -> None:  # F11
    """Of several tenants each keeps its share, however urgent another's requests are, in a worker's queue, too."""
    limits = DispatchLimits(lone_worker_queue=0, client_share=share, takes_priorities=True)
    _, _, dispatcher = scripted("a", limits=limits, max_num_seqs=1)
    served: dict[str, int] = {}
    asked = {"a1": 1, "b2": 1, "a3": -2, "a4": -MAX_PRIORITY, "b5": 0, "b6": 1}

    def prompt(name: str) -> Prompt:
        tenant = name[:1].encode() if share < 1 else b""
        return Prompt([1], tenant=tenant, priority=asked.get(name, 0))

    async def serve(name: str) -> None:
        async with dispatcher.place("echo", prompt(name)) as placement:
            served[name] = placement.priority

    async with dispatcher.place("echo", prompt("a0")):
        waiting = [asyncio.create_task(serve(name)) for name in asked]
        await until(lambda: dispatcher.num_waiting == len(asked))
    await asyncio.gather(*waiting)
    assert list(served) == ORDERS[share]
    assert served == (asked if share == 1 else dict.fromkeys(asked, 0))


HEAVY = {
    "samples of one request": [(1, 128)],
    "samples of several requests": [(3, 128)],
    "few samples of many requests": [(40, 8)],
    "many long answers": [(200, 1)],
    "128 prompts of a completion, each with samples": [(128, 2)],
    "requests of every size": [(20, 1), (1, 128), (20, 1), (5, 16)],
    "two tenants with all that they may have": [(200, 1), (3, 128)],
}
"""What is sent before another tenant's chat: numbers of requests, and of samples of each."""


@pytest.mark.ci
@table("sent", HEAVY.values(), HEAVY)
@table("workers", ["a", "ab"])
@table("queue", [0, 8, 64])
@table("num_processes", [1, 2])
async def test_whatever_a_tenant_sends_others_find_rows(
    sent: list[tuple[int, int]], workers: str, queue: int, num_processes: int
) -> None:  # F11
    limits = DispatchLimits(
        worker_queue=queue, lone_worker_queue=queue, client_share=0.75, max_waiting=1000, num_processes=num_processes
    )
    _, router, dispatcher = scripted(*workers, limits=limits, max_num_seqs=64)
    is_over = asyncio.Event()
    placed: list[Placement] = []

    async def hold(prompt: Prompt) -> None:
        async with dispatcher.place("echo", prompt) as placement:
            placed.append(placement)
            await is_over.wait()

    names = [b"one", b"two"] if sent is HEAVY["two tenants with all that they may have"] else [b"one"] * len(sent)
    asked = [
        Prompt([1], tenant=name, num_samples=num_samples)
        for name, (number, num_samples) in zip(names, sent, strict=True)
        for _ in range(number)
    ]
    tasks = [asyncio.create_task(hold(prompt)) for prompt in asked]
    for _ in range(20):
        await asyncio.sleep(0)
    num_rows = 64 * len(workers) // num_processes
    num_held = sum(placement.num_at_once for placement in placed)
    assert num_held < num_rows
    assert num_held >= min(num_rows // 2, sum(prompt.num_samples for prompt in asked) // 2, 64 // num_processes // 2)
    async with asyncio.timeout(0), dispatcher.place("echo", Prompt([1], tenant=b"other")) as placement:
        assert placement.num_at_once == 1
    is_over.set()
    await asyncio.gather(*tasks)
    assert len(placed) == len(asked)
    assert all(work == WorkInFlight() for work in router.works().values())


@pytest.mark.parametrize(
    "leaves", ["while it is placed", "before the first token", "after it", "at the end", "by an error"]
)
async def test_whatever_ends_a_request_its_booking_is_taken_back(leaves: str) -> None:
    workers, router, dispatcher = scripted("a", "b", policy="cost")
    prompt = Prompt(list(range(64)))
    if leaves == "by an error":
        workers["a"].script = workers["b"].script = [ZeroDivisionError()]
    with contextlib.suppress(ZeroDivisionError, asyncio.CancelledError):
        async with dispatcher.place("echo", prompt) as placement:
            assert router.work_of(placement.worker.url).num_requests == 1
            if leaves == "while it is placed":
                raise asyncio.CancelledError
            request = ask("r", list(prompt.token_ids))
            async with contextlib.aclosing(stream(dispatcher, placement, request)) as deltas:
                if leaves != "before the first token":
                    async for _ in deltas:
                        if leaves == "after it":
                            break
    assert all(work == WorkInFlight() for work in router.works().values())
    has_begun = leaves in ("after it", "at the end")
    assert bool(router.assumptions) == has_begun


async def test_delayed_lookup_chooses_among_ready_workers() -> None:
    class Slow:
        """Answers when a worker has gone."""

        async def overlaps(self, targets: Targets, keys: object, images: object) -> Overlaps:
            await asyncio.sleep(0)
            workers["a"].become(ready=False)
            return Overlaps(np.array([3, 0]), np.ones(2, np.bool_), np.zeros((0, 2), np.bool_), np.zeros(2, np.int64))

    workers, router, _ = scripted("a", "b")
    worker_pool = WorkerPool((), lambda _: None)
    for worker in workers.values():
        worker_pool.add(worker)
        worker.on_change = worker_pool.changed
    dispatcher = Dispatcher(worker_pool, router, lookup=Slow())
    async with dispatcher.place("echo", Prompt(list(range(64)))) as placement:
        assert placement.worker.url == "b"
    workers["a"].become(ready=True)
    preview = await dispatcher.preview("echo", Prompt(list(range(64))))
    assert preview.choice.workers == ["b"]
    assert (preview.choice.worker, preview.choice.policy, preview.model.name) == ("b", "round_robin", "echo")
    workers["b"].become(ready=False)
    with pytest.raises(WorkerUnavailable):
        await dispatcher.preview("echo", Prompt([1]))


async def test_draining_workers_get_nothing_and_the_load_of_others_counts() -> None:
    workers, _, dispatcher = scripted("a", "b", policy="least_load")
    workers["a"].become(load=Load(num_waiting=4))
    chosen = set()
    for _ in range(8):
        async with dispatcher.place("echo", Prompt([1])) as placement:
            chosen.add(placement.worker.url)
    assert chosen == {"b"}


def test_runs_of_a_split_image_continue() -> None:
    images = [(b"a", (Span(2, 3), Span(9, 4))), (b"b", (Span(6, 2),))]
    assert media_runs(images) == (MediaRun(2, 3, b"a", 0), MediaRun(6, 2, b"b", 0), MediaRun(9, 4, b"a", 3))

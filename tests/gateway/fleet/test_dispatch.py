"""Fleet and Dispatcher over real workers with echo engines."""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path

import pytest
from echo_worker import STALL, ask, serving, until

from saccade.errors import ModelNotFound, SaccadeError, WorkerFailed, WorkerUnavailable
from saccade.gateway.fleet.dispatch import Dispatcher, Placement, Prompt, media_runs
from saccade.gateway.fleet.workers import Fleet, Model
from saccade.identity.blocks import MediaRun
from saccade.protocol.description import Description
from saccade.protocol.media import Span
from saccade.protocol.output import FinishReason, TokenDelta
from saccade.protocol.request import EngineRequest, MediaPixels
from saccade.transport import shared_memory
from saccade.transport.client import Supply


def folders(root: Path, *names: str) -> list[Path]:
    made = [root / name for name in names]
    for folder in made:
        folder.mkdir()
    return made


def url(folder: Path) -> str:
    return f"unix:{folder}/w.sock"


@contextlib.asynccontextmanager
async def fleet_of(*places: Path, released: list[str]) -> AsyncIterator[Fleet]:
    fleet = Fleet([url(place) for place in places], released.extend)
    await fleet.start()
    try:
        yield fleet
    finally:
        await fleet.close()


async def answer(dispatcher: Dispatcher, request: EngineRequest, model: str = "echo") -> list[int]:
    with dispatcher.place(model, Prompt(request.token_ids)) as placement:
        return [token async for delta in dispatcher.stream(placement, request) for token in delta.token_ids]


async def test_fleet_follows_its_workers(tmp_path: Path) -> None:
    (a,) = folders(tmp_path, "a")
    seen: list[Model] = []
    async with fleet_of(a, released=[]) as fleet:
        fleet.on_model(seen.append)
        assert not fleet.ready
        with pytest.raises(WorkerUnavailable):
            fleet.model("echo")
        async with serving(a):
            await until(lambda: fleet.ready)
            assert [model.name for model in seen] == ["echo"]
            assert seen[0].description.files.files == {"config.json": b"{}"}
            assert [model.name for model in fleet.models()] == ["echo"]
            with pytest.raises(ModelNotFound, match="served: echo") as failure:
                fleet.model("other")
            assert failure.value.param == "model"
        await until(lambda: not fleet.ready)
        with pytest.raises(WorkerUnavailable):
            fleet.model("echo")
        async with serving(a):
            await until(lambda: fleet.ready)
        async with serving(a, fingerprint="g"):
            await until(lambda: len(seen) == 2)
        assert [model.description.fingerprint for model in seen] == [b"f", b"g"]


async def test_work_goes_where_least_is_in_flight(tmp_path: Path) -> None:
    a, b = folders(tmp_path, "a", "b")
    async with serving(a), serving(b), fleet_of(a, b, released=[]) as fleet:
        await until(lambda: all(client.ready for client in fleet.clients))
        dispatcher = Dispatcher(fleet)
        stalled = [asyncio.create_task(answer(dispatcher, ask(f"r{n}", [STALL]))) for n in range(4)]
        await until(lambda: [client.load and client.load.num_running for client in fleet.clients] == [2, 2])
        assert dispatcher.num_requests == 4
        for task in stalled:
            task.cancel()
        await asyncio.gather(*stalled, return_exceptions=True)
        assert dispatcher.num_requests == 0
        await until(lambda: [client.load and client.load.num_running for client in fleet.clients] == [0, 0])
        assert await answer(dispatcher, ask("next", [1, 2])) == [1, 2]


async def test_worker_with_another_model_of_the_same_name_gets_no_work(tmp_path: Path) -> None:
    a, b = folders(tmp_path, "a", "b")
    async with serving(a), serving(b, fingerprint="g"), fleet_of(a, b, released=[]) as fleet:
        await until(lambda: all(client.ready for client in fleet.clients))
        assert [worker.url for worker in fleet.model("echo").workers] == [url(a)]


async def test_models_are_told_apart_by_name(tmp_path: Path) -> None:
    a, b = folders(tmp_path, "a", "b")
    async with serving(a), serving(b, model="other"), fleet_of(a, b, released=[]) as fleet:
        await until(lambda: all(client.ready for client in fleet.clients))
        assert [model.name for model in fleet.models()] == ["echo", "other"]
        assert [worker.url for worker in fleet.model("other").workers] == [url(b)]


async def test_alias_means_its_model_and_a_models_own_name_wins(tmp_path: Path) -> None:
    a, b = folders(tmp_path, "a", "b")
    names = {"model": "one", "aliases": ["first", "two"]}
    async with serving(a, **names), serving(b, model="two"), fleet_of(a, b, released=[]) as fleet:
        await until(lambda: all(client.ready for client in fleet.clients))
        assert [fleet.model(name).name for name in ("one", "first", "two")] == ["one", "one", "two"]
        assert [(model.name, fleet.aliases(model.name)) for model in fleet.models()] == [
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
    async with serving(a), fleet_of(tmp_path / place, released=[]) as fleet:
        await until(lambda: fleet.ready or place == "nowhere")
        with pytest.raises(error):
            await answer(Dispatcher(fleet), ask("r", [1]), model)


async def test_slots_come_back_when_the_worker_is_gone_before_the_request_is_sent(tmp_path: Path) -> None:
    released: list[str] = []
    (a,) = folders(tmp_path, "a")
    async with fleet_of(a, released=released) as fleet:
        dispatcher = Dispatcher(fleet)
        with contextlib.ExitStack() as held:
            async with serving(a, shm_namespace=shared_memory.namespace()):
                await until(lambda: fleet.ready)
                placement = held.enter_context(dispatcher.place("echo", Prompt([1])))
            await until(lambda: not fleet.ready)
            with pytest.raises(WorkerUnavailable):
                async with contextlib.aclosing(dispatcher.stream(placement, ask("r", [1], "slot", "slot"))) as deltas:
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
    fleet = Fleet([url(a)], lambda names: [pool.release(name) for name in names])
    await fleet.start()
    try:
        async with serving(a, shm_namespace=place, journal=str(journal)):
            await until(lambda: fleet.ready)
            assert await answer(Dispatcher(fleet), request) == [1]
            assert journal.read_text() == ("" if same_machine else f"inline {pixels.hex()}\n")
            assert pool.num_used == 0
    finally:
        await fleet.close()
        pool.close()


class Asking:
    """A worker that asks for the pixels of its third picture before it answers."""

    def __init__(self, description: Description | None) -> None:
        self.description = description
        self.brought: tuple[MediaPixels, ...] = ()

    async def generate(self, request: EngineRequest, supply: Supply) -> AsyncGenerator[TokenDelta, None]:
        self.brought = await supply([2])
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

    fleet = Fleet([url(a)], lambda names: [pool.release(name) for name in names])
    await fleet.start()
    try:
        async with serving(a, shm_namespace=shared_memory.namespace() if same_machine else "elsewhere"):
            await until(lambda: fleet.ready)
            asking = Asking(fleet.clients[0].description)
            placement = Placement(asking, "uint8")  # type: ignore[arg-type]
            async for _ in Dispatcher(fleet).stream(placement, ask("r", [1]), supply):
                pass
        assert asking.brought == ((MediaPixels(2, slot.ref) if same_machine else MediaPixels(2, inline=b"abc")),)
        assert pool.num_used == same_machine  # it comes back from the worker
    finally:
        await fleet.close()
        pool.close()


async def test_engine_that_dies_fails_the_request_and_its_work_is_forgotten(tmp_path: Path) -> None:
    (a,) = folders(tmp_path, "a")
    async with serving(a) as worker, fleet_of(a, released=[]) as fleet:
        await until(lambda: fleet.ready)
        dispatcher = Dispatcher(fleet)
        request = asyncio.create_task(answer(dispatcher, ask("r", [STALL])))
        await until(lambda: fleet.clients[0].load and fleet.clients[0].load.num_running)
        worker.relay.lost("The engine is gone.")
        with pytest.raises(WorkerFailed):
            await request
        assert dispatcher.num_requests == 0


def test_runs_of_a_picture_in_pieces_go_on_where_the_last_one_ended() -> None:
    pictures = [(b"a", (Span(2, 3), Span(9, 4))), (b"b", (Span(6, 2),))]
    assert media_runs(pictures) == (MediaRun(2, 3, b"a", 0), MediaRun(6, 2, b"b", 0), MediaRun(9, 4, b"a", 3))

"""A prefill and a decode worker of SGLang as one worker, against SMG's own servicer and two scripted engines."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sglang_servicer import Engine, Rooms, arguments, listening, servicer_class
from smg_servicer import STOPPED
from streams import generate
from tables import table
from test_sglang_servicer import PIXELS, ask, floats
from tokenspeed_worker import FILES, Slots, context
from waiting import until

from saccade.connectors.smg.sglang_address import SglangAddress, paired
from saccade.connectors.smg.sglang_pair import SglangPair
from saccade.errors import RequestError, StartupError, WorkerFailed, WorkerUnavailable
from saccade.fleet.pool import WorkerPool
from saccade.protocol.media import MediaItem


@pytest.fixture
def servicer_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    with servicer_class(monkeypatch) as found:
        yield found


class Legs:
    """Two engines that share rooms: the decode one answers a request whose prompt has arrived."""

    def __init__(self, folder: Path) -> None:
        for name, content in FILES.files.items():
            (folder / name).write_bytes(content)
        rooms = Rooms()
        self.prefill = Engine(
            arguments(folder, disaggregation_mode="prefill", disaggregation_bootstrap_port=9001),
            [([1], {"type": "length"})],
            rooms,
        )
        self.decode = Engine(
            arguments(folder, disaggregation_mode="decode"), [([1, 2], None), ([3, 7], STOPPED)], rooms
        )


@pytest.fixture
def legs(tmp_path: Path) -> Legs:
    return Legs(tmp_path)


@asynccontextmanager
async def pair(legs: Legs, servicer_of: Any, slots: Slots, query: str = "") -> AsyncIterator[SglangPair]:
    legs_of = listening(legs.prefill.servicer(servicer_of)), listening(legs.decode.servicer(servicer_of))
    async with legs_of[0] as prefill, legs_of[1] as decode:
        client = SglangPair(f"sglang://{decode}?prefill={prefill}{query}", context(slots))
        await client.start()
        try:
            yield client
        finally:
            await client.close()


async def answer(client: SglangPair, *media: MediaItem) -> list[list[int]]:
    await until(lambda: client.state.ready)
    return [delta.token_ids async for delta in generate(client, ask(*media))]


async def test_both_legs(legs: Legs, servicer_of: Any, slots: Slots) -> None:  # A8
    slot = slots.filled(PIXELS)
    async with pair(legs, servicer_of, slots) as client:
        assert await answer(client, floats(slot=slot)) == [[1, 2], [3, 7]]
        await answer(client)
    first, second = legs.prefill.requests
    decoded = legs.decode.requests[0]
    # Images are on the prefill leg only; both have the prompt's ids.
    assert first.mm_inputs.mm_items[0].feature.numpy().tobytes() == PIXELS
    assert decoded.mm_inputs is None
    assert decoded.input_ids == first.input_ids
    meeting = (first.bootstrap_host, first.bootstrap_port, first.bootstrap_room)
    assert meeting == (decoded.bootstrap_host, decoded.bootstrap_port, decoded.bootstrap_room)
    assert meeting[:2] == ("127.0.0.1", 9001)
    assert 1 <= meeting[2] < 1 << 31
    assert second.bootstrap_room != first.bootstrap_room
    assert slots.released == [slot.name]
    assert (legs.prefill.aborted, legs.decode.aborted) == ([], [])


async def test_a_bootstrap_port_that_the_operator_gives(legs: Legs, servicer_of: Any, slots: Slots) -> None:
    async with pair(legs, servicer_of, slots, "&bootstrap=1234") as client:
        await answer(client)
    assert legs.prefill.requests[0].bootstrap_port == 1234


async def test_description_of_a_pair(legs: Legs, servicer_of: Any, slots: Slots) -> None:
    async with pair(legs, servicer_of, slots) as client:
        await until(lambda: client.state.ready and client.state.load)
        assert client.state.description is not None
        assert (client.state.description.model, client.state.description.files) == ("m", FILES)
        assert client.state.load is not None
        assert (client.state.load.num_running, client.state.load.num_waiting) == (2, 2)
        assert client.state.exactness.level == "NONE"


async def test_closing_aborts_both_legs(legs: Legs, servicer_of: Any, slots: Slots) -> None:  # A8
    legs.prefill.steps = [([], None)] * 1000
    legs.decode.steps = [([1], None)] * 1000
    legs.prefill.wait_seconds = legs.decode.wait_seconds = 0.05
    async with pair(legs, servicer_of, slots) as client:
        await until(lambda: client.state.ready)
        deltas = generate(client, ask())
        await anext(deltas)
        await deltas.aclose()
        await until(lambda: "r1" in legs.prefill.aborted and "r1" in legs.decode.aborted)


async def test_closing_at_once_aborts_the_prefill_leg(legs: Legs, servicer_of: Any, slots: Slots) -> None:  # A8
    legs.prefill.steps = [([], None)] * 1000
    legs.prefill.wait_seconds = 0.05
    async with pair(legs, servicer_of, slots) as client:
        await until(lambda: client.state.ready)
        running = asyncio.all_tasks()
        asking = asyncio.ensure_future(anext(generate(client, ask())))
        await asyncio.sleep(0)  # the prefill leg is a task by now, and has not begun
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        prefilling = {task for task in asyncio.all_tasks() - running if "_end_of" in repr(task)}
        assert all(task.cancelling() or task.done() for task in prefilling)


async def test_a_prefill_leg_that_fails_ends_the_request(legs: Legs, servicer_of: Any, slots: Slots) -> None:  # A8
    legs.prefill.steps = [([], {"type": "abort", "message": "inner words", "status_code": 400})]
    legs.decode.rooms = Rooms()  # nothing arrives
    slot = slots.filled(PIXELS)
    async with pair(legs, servicer_of, slots) as client:
        with pytest.raises(RequestError):
            await answer(client, floats(slot=slot))
        await until(lambda: "r1" in legs.decode.aborted)
    assert slots.released == [slot.name]


async def test_a_decode_leg_that_fails_ends_the_request(legs: Legs, servicer_of: Any, slots: Slots) -> None:  # A8
    legs.prefill.steps = [([], None)] * 1000
    legs.prefill.wait_seconds = 0.05
    legs.decode.steps = [([1], None), ([], {"type": "abort", "message": "inner words", "status_code": 500})]
    async with pair(legs, servicer_of, slots) as client:
        with pytest.raises(WorkerFailed):
            await answer(client)
        await until(lambda: "r1" in legs.prefill.aborted)


async def test_a_prefill_worker_that_dies_is_a_clear_failure(legs: Legs, servicer_of: Any, slots: Slots) -> None:  # A8
    legs.prefill.wait_seconds = 60.0
    async with listening(legs.decode.servicer(servicer_of)) as decode:
        async with listening(legs.prefill.servicer(servicer_of)) as prefill:
            client = SglangPair(f"sglang://{decode}?prefill={prefill}", context(slots))
            await client.start()
            await until(lambda: client.state.ready)
            deltas = generate(client, ask())
            first = asyncio.ensure_future(anext(deltas))
            await until(lambda: legs.prefill.requests and legs.decode.requests)
        with pytest.raises((WorkerFailed, WorkerUnavailable)):
            await first
        await until(lambda: not client.state.ready)
        slot = slots.filled(PIXELS)
        with pytest.raises(WorkerUnavailable):
            [delta async for delta in generate(client, ask(floats(slot=slot)))]
        await client.close()
    assert slots.released == [slot.name]


async def test_workers_of_different_models_are_no_pair(
    legs: Legs, servicer_of: Any, slots: Slots, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_bytes(b'{"other": 1}')
    legs.decode.arguments = arguments(other, disaggregation_mode="decode")
    async with pair(legs, servicer_of, slots) as client:
        await until(lambda: "different models" in caplog.text)
        assert not client.state.ready
        assert "different models" in client.state.loss


# --- addresses ---


@pytest.mark.parametrize(
    "url",
    [
        "sglang://a:1",
        "sglang://a:1?prefill=b:2",
        "sglang://a:1?prefill=b:2&bootstrap=3",
        "sglang://a:1?bootstrap=3&role=prefill",
        "sglang://a:1?role=decode",
    ],
)
def test_addresses(url: str) -> None:
    assert SglangAddress.read(url).url == url


@table(
    "url",
    [
        "sglang://a",
        "grpc://a:1",
        "sglang://a:1/x",
        "sglang://a:1?prefill=b",
        "sglang://a:1?prefill=",
        "sglang://a:1?role=both",
        "sglang://a:1?role=decode&prefill=b:2",
        "sglang://a:1?role=decode&bootstrap=3",
        "sglang://a:1?bootstrap=3",
        "sglang://a:1?prefill=b:2&bootstrap=x",
        "sglang://a:1?prefill=b:2&bootstrap=65536",
        "sglang://a:1?prefill=b:2&prefill=c:2",
        "sglang://a:1?rank=1",
    ],
)
def test_malformed_addresses(url: str) -> None:
    with pytest.raises(StartupError, match="HOST:PORT"):
        SglangAddress.read(url)


def test_sides_are_paired() -> None:  # A8
    urls = (
        "grpc://x:1",
        "sglang://p:1?role=prefill&bootstrap=5",
        "sglang://d:1?role=decode",
        "sglang://q:1?role=prefill",
        "sglang://both:1",
    )
    expected = ("grpc://x:1", "sglang://both:1", "sglang://d:1?prefill=p:1&bootstrap=5", "sglang://d:1?prefill=q:1")
    assert paired(urls) == expected
    fleet = WorkerPool(urls, on_released=lambda _: None)
    assert tuple(worker.url for worker in fleet.clients) == expected


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_side_alone(role: str) -> None:
    with pytest.raises(StartupError, match="other role"):
        paired([f"sglang://a:1?role={role}"])

"""What may be in flight at a time."""

import asyncio

import pytest

from saccade.errors import QueueFull
from saccade.gateway.admission import Admission


async def test_pixels_wait_for_room_and_give_it_back() -> None:
    admission = Admission(max_requests=9, max_pixel_bytes=100)
    order: list[str] = []

    async def serve(name: str, nbytes: int, until: asyncio.Event) -> None:
        async with admission.pixels(nbytes):
            order.append(name)
            await until.wait()

    first, others = asyncio.Event(), asyncio.Event()
    others.set()
    running = [
        asyncio.create_task(serve("first", 60, first)),
        asyncio.create_task(serve("too much beside it", 41, others)),
    ]
    running += [asyncio.create_task(serve("fits", 40, others)), asyncio.create_task(serve("text only", 0, others))]
    await asyncio.sleep(0.01)
    assert order == ["first", "fits", "text only"]
    first.set()
    await asyncio.gather(*running)
    assert order[-1] == "too much beside it"
    assert admission.num_pixel_bytes == 0


async def test_a_request_over_the_whole_budget_goes_alone() -> None:
    admission = Admission(max_requests=9, max_pixel_bytes=100)
    async with admission.pixels(1000):
        with pytest.raises(QueueFull):
            async with admission.pixels(1, wait_seconds=0.01):
                pass
        async with admission.pixels(0, wait_seconds=0.01):
            pass
    assert admission.num_pixel_bytes == 0


async def test_one_who_leaves_while_waiting_holds_nothing() -> None:
    admission = Admission(max_requests=9, max_pixel_bytes=100)
    async with admission.pixels(100):
        waiting = asyncio.create_task(admission.pixels(1).__aenter__())
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert admission.num_pixel_bytes == 100

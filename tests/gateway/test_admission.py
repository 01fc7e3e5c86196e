"""What may be in flight at a time."""

import asyncio
import contextlib
import time

import pytest

from saccade.errors import QueueFull
from saccade.gateway.admission import HUGE_BODY_BYTES, LARGE_BODY_BYTES, TURNS, Admission


async def test_large_bodies_are_read_by_turns_and_small_ones_at_once(monkeypatch: pytest.MonkeyPatch) -> None:  # A6
    monkeypatch.setattr("saccade.gateway.admission.READING_SECONDS", 60)
    admission = Admission(max_requests=99)
    order: list[str] = []
    go_on = asyncio.Event()

    async def read(name: str, num_bytes: int | None) -> None:
        async with admission.reading(num_bytes):
            order.append(name)
            await go_on.wait()

    large = [f"large {index}" for index in range(TURNS)]
    reading = [asyncio.create_task(read(name, LARGE_BODY_BYTES + 1)) for name in large]
    reading += [asyncio.create_task(read("behind them", LARGE_BODY_BYTES + 1))]
    reading += [asyncio.create_task(read("small", LARGE_BODY_BYTES)), asyncio.create_task(read("huge", None))]
    await asyncio.sleep(0)
    assert order == [*large, "small", "huge"]  # huge ones take turns of their own
    go_on.set()
    await asyncio.gather(*reading)
    assert order[-1] == "behind them"


async def test_a_slow_body_passes_its_turn_on(monkeypatch: pytest.MonkeyPatch) -> None:  # A6
    monkeypatch.setattr("saccade.gateway.admission.READING_SECONDS", 0.01)
    admission = Admission(max_requests=99)
    async with contextlib.AsyncExitStack() as slow:
        for _ in range(3 * TURNS):
            await slow.enter_async_context(admission.reading(None))
    # All turns are back, none of them twice.
    async with contextlib.AsyncExitStack() as quick:
        for _ in range(TURNS):
            await quick.enter_async_context(admission.reading(None))
        waiting = asyncio.create_task(admission.reading(None).__aenter__())
        await asyncio.sleep(0)
        assert not waiting.done()
        waiting.cancel()


async def test_turns_of_text_do_not_wait_for_images() -> None:  # A6
    admission = Admission(max_requests=99)
    async with contextlib.AsyncExitStack() as images:
        for _ in range(TURNS):
            await images.enter_async_context(admission.turn(LARGE_BODY_BYTES + 1))
        async with admission.turn(LARGE_BODY_BYTES):
            pass


def hold_the_loop(seconds: float) -> None:
    time.sleep(seconds)


async def test_small_requests_are_served_between_huge_ones() -> None:  # A6
    admission = Admission(max_requests=99)
    order: list[str] = []

    async def work(name: str, num_bytes: int, seconds: float, num_rounds: int) -> None:
        for _ in range(num_rounds):
            await asyncio.sleep(0)
        async with admission.turn(num_bytes):
            hold_the_loop(seconds)
            order.append(name)

    huge = [work(f"huge {number}", HUGE_BODY_BYTES + 1, 0.1, 0) for number in range(2)]
    # As a request that is read and refused, the small one needs several rounds of the loop.
    await asyncio.gather(*huge, work("small", 1, 0, 20))
    assert order == ["huge 0", "small", "huge 1"]


def test_tenants_that_come_later_find_a_place() -> None:  # F11
    admission = Admission(max_requests=64, max_tenant_requests=48)
    with contextlib.ExitStack() as held:

        def fill(tenant: bytes) -> int:
            """How many places *tenant* gets."""
            for count in range(65):
                try:
                    held.enter_context(admission.admit(tenant))
                except QueueFull:
                    return count
            raise AssertionError("no bound")

        assert [fill(name) for name in (b"a", b"b", b"c", b"d")] == [48, 12, 3, 1]
    with contextlib.ExitStack() as held:
        for number in range(55):  # three sevenths of the places each
            held.enter_context(admission.admit((b"a", b"b")[number % 2]))
        for tenant in (b"a", b"b"):
            with pytest.raises(QueueFull, match="which is its share"):
                admission.check(tenant)
        admission.check(b"c")

"""Requests that wait for a worker with room."""

import asyncio
import contextlib

import pytest

from saccade.errors import QueueFull, WorkerUnavailable
from saccade.gateway.limits import place_queue
from saccade.gateway.limits.place_queue import PlaceQueue


class Places:
    """Places behind a queue, and who has got one, in order."""

    def __init__(self, num_free: int, max_waiting: int = 9, wait_seconds: float = 60.0) -> None:
        self.num_free = num_free
        self.entered: list[str] = []
        self.queue = PlaceQueue(max_waiting, wait_seconds)
        self.looking_up = asyncio.Event()
        self.looking_up.set()

    async def take(self, name: str, line: str = "m") -> None:
        async with self.queue.turn(line, lambda: self.num_free):
            await self.looking_up.wait()
            self.num_free -= 1
            self.entered.append(name)

    def start(self, *names: str) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self.take(name)) for name in names]

    def give(self, count: int = 1) -> None:
        self.num_free += count
        self.queue.changed()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_free_place_is_taken_at_once_and_others_wait_in_order() -> None:
    places = Places(1)
    tasks = places.start("a", "b", "c", "d")
    await settle()
    assert (places.entered, places.queue.num_waiting) == (["a"], 3)
    places.give(2)
    await settle()
    assert (places.entered, places.num_free) == (["a", "b", "c"], 0)
    places.give()
    await asyncio.gather(*tasks)
    assert places.entered == ["a", "b", "c", "d"]
    assert places.queue.num_waiting == 0


async def test_a_place_is_not_given_twice_while_one_who_enters_still_looks_up() -> None:
    places = Places(0)
    places.looking_up.clear()
    tasks = places.start("a", "b")
    await settle()
    places.give()
    await settle()
    assert places.queue.num_waiting == 1
    places.looking_up.set()
    await settle()
    assert (places.entered, places.num_free) == (["a"], 0)
    places.give()
    await asyncio.gather(*tasks)


async def test_a_newcomer_does_not_overtake() -> None:
    places = Places(0)
    tasks = places.start("a")
    await settle()
    places.num_free = 1
    tasks += places.start("b")
    await settle()
    assert places.entered == []  # nobody has said that there is a place
    places.give()
    await asyncio.gather(*tasks)
    assert places.entered == ["a", "b"]


async def test_lines_do_not_wait_for_one_another() -> None:
    places = Places(0)
    waiting = places.start("a")
    await settle()
    async with places.queue.turn("other", lambda: 1):
        pass
    waiting[0].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_too_many_are_refused() -> None:
    places = Places(0, max_waiting=1)
    tasks = places.start("a")
    await settle()
    with pytest.raises(QueueFull, match="1 requests are waiting"):
        await places.take("b")
    places.give()
    await asyncio.gather(*tasks)
    nobody = Places(0, max_waiting=0)
    with pytest.raises(QueueFull):
        await nobody.take("a")


async def test_who_waits_too_long_is_refused() -> None:
    places = Places(0, wait_seconds=0.01)
    with pytest.raises(QueueFull, match=r"within 0\.01 seconds"):
        await places.take("a")
    assert places.queue.num_waiting == 0


async def test_one_who_leaves_makes_room_for_the_next() -> None:
    places = Places(0)
    first, second = places.start("a", "b")
    await settle()
    places.num_free = 1
    first.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await first
    await second
    assert places.entered == ["b"]


async def test_those_who_wait_learn_that_no_worker_is_left() -> None:
    queue, is_away = PlaceQueue(9, 60.0), False

    def num_free() -> int:
        if is_away:
            raise WorkerUnavailable("gone")
        return 0

    async def take() -> None:
        async with queue.turn("m", num_free):
            pass

    tasks = [asyncio.create_task(take()) for _ in range(2)]
    await settle()
    is_away = True
    queue.changed()
    assert [type(error) for error in await asyncio.gather(*tasks, return_exceptions=True)] == [WorkerUnavailable] * 2


async def test_a_place_that_was_not_taken_after_all_goes_to_the_next() -> None:
    places = Places(0)
    places.looking_up.clear()
    first, second = places.start("a", "b")
    await settle()
    places.give()
    await settle()
    assert places.queue.num_waiting == 1
    first.cancel()
    await settle()
    places.looking_up.set()
    await asyncio.wait_for(second, 0.5)  # no later than it would look by itself
    assert places.entered == ["b"]


async def test_a_place_that_comes_with_time_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place_queue, "LOOK_SECONDS", 0.01)
    places = Places(0)
    (task,) = places.start("a")
    await settle()
    places.num_free = 1
    await asyncio.wait_for(task, 30)
    assert places.entered == ["a"]

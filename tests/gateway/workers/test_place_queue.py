"""Requests that wait for a worker with room."""

import asyncio
import contextlib

import pytest

from saccade.errors import QueueFull, WorkerUnavailable
from saccade.gateway.tenants.account import Tenant
from saccade.gateway.workers import place_queue
from saccade.gateway.workers.place_queue import PlaceQueue


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
    assert places.entered == ["a"]
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


async def test_request_that_waits_too_long_is_refused() -> None:
    places = Places(0, wait_seconds=0.01)
    with pytest.raises(QueueFull, match=r"within 0\.01 seconds"):
        await places.take("a")
    assert places.queue.num_waiting == 0


async def test_cancelled_request_makes_room_for_the_next() -> None:
    places = Places(0)
    first, second = places.start("a", "b")
    await settle()
    places.num_free = 1
    first.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await first
    await second
    assert places.entered == ["b"]


async def test_waiting_requests_fail_when_no_worker_is_left() -> None:
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


async def test_a_place_that_was_not_taken_after_all_goes_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place_queue, "LOOK_SECONDS", 600)  # it does not look by itself
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
    await asyncio.wait_for(second, 30)
    assert places.entered == ["b"]


async def test_a_place_that_comes_with_time_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place_queue, "LOOK_SECONDS", 0.01)
    places = Places(0)
    (task,) = places.start("a")
    await settle()
    places.num_free = 1
    await asyncio.wait_for(task, 30)
    assert places.entered == ["a"]


def tenant(name: str, priority: int = 1) -> Tenant:
    return Tenant(id=name.encode(), name=name, priority=priority)


A, B, C = tenant("a"), tenant("b"), tenant("c")


class Shared:
    """Places that tenants hold until the test takes them back; *entered* has the tenant of each request, in order."""

    def __init__(self, num_free: int = 0, max_waiting: int = 99) -> None:
        self.num_free = num_free
        self.entered: list[str] = []
        self.queue = PlaceQueue(max_waiting, 60.0)
        self.holders: dict[str, list[asyncio.Event]] = {}
        self.tasks: list[asyncio.Task[None]] = []

    async def hold(self, tenant: Tenant) -> None:
        done = asyncio.Event()
        with contextlib.ExitStack() as held:
            async with self.queue.turn("m", lambda: self.num_free, tenant):
                held.enter_context(self.queue.holding("m", tenant))
                self.num_free -= 1
                self.entered.append(tenant.name)
                self.holders.setdefault(tenant.name, []).append(done)
            await done.wait()
            self.num_free += 1
        self.queue.changed()

    async def ask(self, *tenants: Tenant) -> list[asyncio.Task[None]]:
        begun = [asyncio.create_task(self.hold(tenant)) for tenant in tenants]
        self.tasks += begun
        await settle()
        return begun

    async def end(self, *names: str) -> str:
        """End a request of each of *names*; return whose requests have begun instead."""
        before = len(self.entered)
        for name in names:
            self.holders[name].pop(0).set()
            await settle()
        return "".join(self.entered[before:])

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def test_tenants_share_places_alike_however_many_requests_each_sends() -> None:  # F11
    places = Shared(num_free=4)
    await places.ask(*[A] * 12, B, B, C)
    assert "".join(places.entered) == "aaaa"
    assert await places.end("a", "a", "a") == "bca"  # at last all three held one, and A was served longest ago
    assert await places.end("b", "c") == "ba"  # nobody else waits then
    await places.ask(B)
    assert await places.end("a") == "b"
    await places.close()


async def test_a_tenant_of_priority_2_holds_twice_as_many_places() -> None:
    places = Shared(num_free=6)
    high = tenant("a", 2)
    await places.ask(*[C] * 6, *[high] * 9, *[B] * 9)
    await places.end(*"cccccc")
    assert sorted(places.entered[6:]) == [*"aaaabb"]
    await places.close()


async def test_of_tenants_with_equal_parts_the_one_that_was_served_longest_ago_is_next() -> None:
    places = Shared(num_free=1)
    await places.ask(C, *[A] * 3, *[B] * 3)
    assert await places.end("c") == "a"
    assert [await places.end(name) for name in "abab"] == [*"baba"]
    await places.close()


async def test_requests_of_one_tenant_keep_their_order_beside_others() -> None:
    places = Shared(num_free=1)
    _, first, _, second = await places.ask(A, B, A, B)
    await places.end("a")
    assert places.entered == ["a", "b"]
    await places.end("b")
    assert (first.done(), second.done()) == (True, False)
    assert places.entered[2] == "a"
    await places.close()


async def test_a_full_queue_takes_the_last_request_of_whoever_has_most() -> None:
    places = Shared(max_waiting=4)
    first, _, third, fourth = await places.ask(A, A, A, A)
    await places.ask(B)
    with pytest.raises(QueueFull, match="others with fewer requests"):
        await fourth
    await places.ask(B)
    with pytest.raises(QueueFull, match="others with fewer requests"):
        await third
    for one in (A, B):  # both have two
        with pytest.raises(QueueFull, match="4 requests are waiting"):
            await places.hold(one)
    high = tenant("c", 2)
    await places.ask(high, high)
    assert places.queue.num_waiting == 4
    assert not first.done()
    with pytest.raises(QueueFull, match="4 requests are waiting"):
        await places.hold(high)  # it would have three for its two, and the others have one each
    await places.close()

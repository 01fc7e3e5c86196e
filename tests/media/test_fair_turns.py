"""Turns go to the client that has the fewest, and none is lost."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.errors import QueueFull
from saccade.media.fair_turns import FairTurns

PATIENT = 120.0


class Crowd:
    """Tasks that take turns and hold them until told; *served* are their names in the order they began."""

    def __init__(self, turns: FairTurns) -> None:
        self.turns = turns
        self.served: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.leave: dict[str, asyncio.Event] = {}

    def come(self, *names: str) -> None:
        """Let tasks wait, each for the client that is the first letter of its name."""
        for name in names:
            self.leave[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._hold(name))

    async def go(self, name: str) -> None:
        self.leave[name].set()
        await self.tasks[name]
        await settle()

    async def cancel(self, *names: str) -> None:
        for name in names:
            self.tasks[name].cancel()
        await asyncio.gather(*(self.tasks[name] for name in names), return_exceptions=True)
        await settle()

    async def _hold(self, name: str) -> None:
        async with self.turns.turn(name[0].encode(), PATIENT):
            self.served.append(name)
            await self.leave[name].wait()


async def settle() -> None:
    """Let everything run that can."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_tenant_alone_takes_all_and_no_more() -> None:
    crowd = Crowd(FairTurns(3))
    crowd.come("a1", "a2", "a3", "a4")
    await settle()
    assert crowd.served == ["a1", "a2", "a3"]
    assert (crowd.turns.num_held, crowd.turns.num_waiting) == (3, 1)
    await crowd.cancel(*crowd.tasks)


async def test_free_turn_goes_to_the_tenant_with_the_fewest() -> None:
    crowd = Crowd(FairTurns(4))
    crowd.come("a1", "a2", "a3", "a4", "a5", "a6", "b1", "b2", "b3", "c1")
    await settle()
    for name in ("a1", "a2", "a3", "b1", "b2"):
        await crowd.go(name)
    # b and c have none, so they come first; then each has one, and a waited longest; what b gives back, b gets again
    assert crowd.served == ["a1", "a2", "a3", "a4", "b1", "c1", "a5", "b2", "b3"]
    await crowd.cancel(*crowd.tasks)


async def test_equal_tenants_take_turns_and_each_is_served_in_order() -> None:
    crowd = Crowd(FairTurns(1))
    crowd.come("a1", "a2", "a3", "b1", "b2", "c1")
    await settle()
    for name in ("a1", "a2", "b1", "c1", "a3", "b2"):
        if name in crowd.served:
            await crowd.go(name)
    assert crowd.served == ["a1", "a2", "b1", "c1", "a3", "b2"]
    assert (crowd.turns.num_held, crowd.turns.num_waiting) == (0, 0)


async def test_bound_of_a_tenant_leaves_turns_for_others() -> None:
    crowd = Crowd(FairTurns(4, max_per_client=3))
    crowd.come("a1", "a2", "a3", "a4", "b1")
    await settle()
    assert crowd.served == ["a1", "a2", "a3", "b1"]
    await crowd.go("b1")
    assert crowd.turns.num_waiting == 1
    await crowd.go("a1")
    assert crowd.served[-1] == "a4"
    await crowd.cancel("a2", "a3", "a4")


async def test_wait_has_an_end() -> None:
    crowd = Crowd(FairTurns(1))
    crowd.come("a1")
    await settle()
    with pytest.raises(QueueFull):
        async with crowd.turns.turn(b"b", 0.01):
            pass
    assert (crowd.turns.num_held, crowd.turns.num_waiting) == (1, 0)
    await crowd.go("a1")


async def test_turn_that_was_granted_to_a_task_cancelled_meanwhile_is_not_lost() -> None:
    crowd = Crowd(FairTurns(1))
    crowd.come("a1", "b1", "c1")
    await settle()
    crowd.leave["a1"].set()
    for _ in range(10):
        if crowd.turns.num_waiting == 1:
            break
        await asyncio.sleep(0)
    assert "b1" not in crowd.served
    crowd.tasks["b1"].cancel()  # its turn is granted, and it has not run yet
    await settle()
    assert crowd.served == ["a1", "c1"]
    await crowd.cancel("c1")
    assert (crowd.turns.num_held, crowd.turns.num_waiting) == (0, 0)


async def test_turn_is_not_granted_to_a_task_that_is_cancelled_in_line() -> None:
    crowd = Crowd(FairTurns(1))
    crowd.come("a1", "b1", "c1")
    await settle()
    await crowd.cancel("a1", "b1")  # the first gives its turn back before the second has left the line
    assert crowd.served == ["a1", "c1"]
    await crowd.cancel("c1")
    assert (crowd.turns.num_held, crowd.turns.num_waiting) == (0, 0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.booleans()), max_size=40), st.integers(1, 4))
def test_no_turn_is_lost_or_made_whatever_happens(script: list[tuple[str, int, bool]], num_turns: int) -> None:
    async def play() -> None:
        crowd = Crowd(FairTurns(num_turns))
        for index, (client, num_rounds, is_cancelled) in enumerate(script):
            crowd.come(f"{client}{index}")
            victim = list(crowd.tasks)[index // 2]
            if is_cancelled:
                crowd.tasks[victim].cancel()
            else:
                crowd.leave[victim].set()
            for _ in range(num_rounds):
                await asyncio.sleep(0)
            assert 0 <= crowd.turns.num_held <= num_turns
        for leave in crowd.leave.values():
            leave.set()
        await asyncio.gather(*crowd.tasks.values(), return_exceptions=True)
        assert (crowd.turns.num_held, crowd.turns.num_waiting) == (0, 0)

    asyncio.run(play())

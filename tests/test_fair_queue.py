"""Turns go to the client that is served least, within the capacities; no turn is lost or made."""

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.errors import Draining, QueueFull
from saccade.fair_queue import FairQueue, Turn

PATIENT = 30.0


def queue_of(
    capacity: int,
    client_capacity: int | None = None,
    max_waiting: int = 100,
    share: float = 1.0,
    obstacle_to: Callable[[object], Hashable] = lambda _: None,
) -> FairQueue:
    return FairQueue(
        capacity,
        "films",
        max_waiting=max_waiting,
        wait_seconds=PATIENT,
        client_capacity=None if client_capacity is None else lambda _: client_capacity,
        client_share=share,
        obstacle_to=obstacle_to,
    )


class Crowd:
    """Tasks that take turns, each for the client that is the first letter of its name, and hold them until told.

    *served* are names in the order of their turns.
    """

    def __init__(self, queue: FairQueue) -> None:
        self.queue = queue
        self.served: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._turns: dict[str, Turn] = {}

    async def come(self, *names: str, weight: int = 1, priority: int = 1, rank: int = 0) -> None:
        for name in names:
            self.tasks[name] = asyncio.create_task(self._take(name, weight, priority, rank))
            await settle()

    async def leave(self, *names: str) -> None:
        for name in names:
            self._turns.pop(name).leave()
            await settle()

    async def cancel(self, *names: str) -> None:
        for name in names:
            self.tasks[name].cancel()
        await settle()

    async def go(self) -> None:
        """Let all go, whatever they do."""
        await self.cancel(*self.tasks)
        while self._turns:
            await self.leave(*self._turns)
        assert (self.queue.weight, self.queue.num_waiting) == (0, 0)

    async def _take(self, name: str, weight: int, priority: int, rank: int) -> None:
        self._turns[name] = await self.queue.enter(name[0], weight, priority, rank=rank)
        self.served.append(name)


async def settle() -> None:
    """Let everything run that can."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_client_alone_takes_all_and_no_more() -> None:
    crowd = Crowd(queue_of(3))
    await crowd.come("a1", "a2", "a3", "a4")
    assert crowd.served == ["a1", "a2", "a3"]
    assert (crowd.queue.weight, crowd.queue.num_waiting) == (3, 1)
    await crowd.leave("a2")
    assert crowd.served == ["a1", "a2", "a3", "a4"]
    await crowd.go()


async def test_turn_with_an_obstacle_is_passed_over_by_those_without_it() -> None:
    begun, obstacles = list[str](), {"a1": "x", "a2": "x", "a3": "", "b1": "x", "b2": ""}
    queue = queue_of(9, obstacle_to=lambda name: obstacles[str(name)] or None)

    async def take(name: str) -> None:
        await queue.enter(name[0], need=name)
        begun.append(name)

    tasks = [asyncio.create_task(take(name)) for name in obstacles]
    await settle()
    assert (begun, queue.num_waiting) == (["a3", "b2"], 3)
    obstacles |= {"a1": "", "b1": "y"}
    queue.advance()
    await settle()
    # Each client's turns stay in order.
    assert (begun[2:], queue.num_waiting) == (["a1"], 2)
    obstacles |= {"a2": "", "b1": ""}
    queue.advance()
    await asyncio.gather(*tasks)
    assert begun[3:] == ["b1", "a2"]


async def test_error_of_a_turn_with_an_obstacle_is_its_own() -> None:
    is_gone = False

    def obstacle(_: object) -> str:
        if is_gone:
            raise Draining("gone")
        return "x"

    queue = queue_of(9, obstacle_to=obstacle)
    waiting = [asyncio.create_task(queue.enter("a", need="a place")), asyncio.create_task(queue.enter("b"))]
    await settle()
    is_gone = True
    queue.advance()
    failed, turn = await asyncio.gather(*waiting, return_exceptions=True)
    assert (type(failed), type(turn)) == (Draining, Turn)
    with pytest.raises(Draining):
        await queue.enter("c", need="a place")
    assert (queue.weight, queue.num_waiting) == (1, 0)


async def test_newcomer_is_next_however_many_wait() -> None:
    crowd = Crowd(queue_of(1))
    await crowd.come(*(f"a{number}" for number in range(60)), "b1")
    await crowd.leave("a0")
    assert crowd.served == ["a0", "b1"]
    await crowd.go()


async def test_client_that_returns_waits_for_those_served_longer_ago() -> None:
    crowd = Crowd(queue_of(1))
    await crowd.come("a1", "a2", "b1")
    await crowd.leave("a1")
    await crowd.come("c1")
    await crowd.leave("b1")
    await crowd.come("b2")
    await crowd.leave("c1")
    await crowd.come("c2")
    await crowd.leave("a2")
    # Two clients that send one request at a time do not keep out a third one that has several.
    assert crowd.served == ["a1", "b1", "c1", "a2", "b2"]
    await crowd.go()


async def test_free_turn_goes_to_the_client_with_least_for_its_priority() -> None:
    crowd = Crowd(queue_of(6))
    await crowd.come("a1", "a2", "a3", "a4", "a5", "a6")
    await crowd.come("a7", "a8")
    await crowd.come("b1", "b2", "b3", "b4", "b5", priority=2)
    await crowd.leave("a1", "a2", "a3", "a4", "a5")
    # At last b has four turns and a two, one of them new: b has twice as many, as its priority says.
    assert crowd.served[6:] == ["b1", "b2", "b3", "b4", "a7"]
    await crowd.go()


async def test_ranks_order_a_client_s_own_turns_alone() -> None:  # F11
    crowd = Crowd(queue_of(1))
    await crowd.come("a1", "a2", "b1", "a3", "b2")
    await crowd.come("a4", "a5", rank=-9)
    await crowd.come("b3", rank=1)
    for _ in range(7):
        await crowd.leave(crowd.served[-1])
    assert crowd.served == ["a1", "b1", "a4", "b2", "a5", "b3", "a2", "a3"]
    await crowd.go()


async def test_without_a_waiting_place_the_newest_leaves_whatever_its_rank() -> None:
    crowd = Crowd(queue_of(1, max_waiting=1))
    await crowd.come("a1", "a2")
    await crowd.come("a3", rank=-1)
    with pytest.raises(QueueFull):
        await crowd.tasks["a3"]
    await crowd.leave("a1")
    assert crowd.served == ["a1", "a2"]
    await crowd.go()


async def test_client_at_its_capacity_is_passed_over() -> None:
    crowd = Crowd(queue_of(4, client_capacity=3))
    await crowd.come("a1", "a2", "a3", "a4", "b1")
    assert crowd.served == ["a1", "a2", "a3", "b1"]
    await crowd.leave("b1")
    assert crowd.queue.num_waiting == 1
    await crowd.leave("a1")
    assert crowd.served[-1] == "a4"
    await crowd.go()


async def test_light_turns_do_not_keep_out_a_heavy_one() -> None:
    crowd = Crowd(queue_of(10))
    await crowd.come("a1", weight=6)
    await crowd.come("b1", weight=8)
    await crowd.come("a2", "c1")
    assert crowd.served == ["a1"]
    await crowd.leave("a1")
    assert crowd.served == ["a1", "b1", "c1", "a2"]
    await crowd.go()


async def test_turn_over_the_capacity_is_given_alone() -> None:
    crowd = Crowd(queue_of(10))
    await crowd.come("a1")
    await crowd.come("b1", weight=11)
    await crowd.come("c1")
    assert crowd.served == ["a1"]
    await crowd.leave("a1")
    assert crowd.served == ["a1", "b1"]
    await crowd.leave("b1")
    assert crowd.served == ["a1", "b1", "c1"]
    await crowd.go()


async def test_turn_over_its_client_s_capacity_weighs_no_more() -> None:
    queue = FairQueue(
        10,
        "films",
        max_waiting=9,
        wait_seconds=PATIENT,
        client_capacity=lambda num_of_others: max(1, (10 - num_of_others) // 2),
    )
    with await queue.enter("a", 11) as first, await queue.enter("b", 11) as second, await queue.enter("c", 1) as third:
        assert (first.weight, second.weight, third.weight, queue.weight) == (5, 2, 1, 8)
    assert queue.weight == 0


@pytest.mark.parametrize(("held", "weight"), [(0, 10), (4, 6), (5, 5), (6, 0)])
async def test_a_heavy_turn_begins_when_half_of_what_its_client_may_hold_is_free(held: int, weight: int) -> None:
    queue = queue_of(100, client_capacity=10)
    with await queue.enter("a", held or 1) as other:
        if not held:
            other.leave()
        heavy = asyncio.create_task(queue.enter("a", 50))
        await settle()
        assert queue.weight - held == weight
    with await heavy as turn:
        assert turn.weight == (weight or 10)


async def test_waiting_places_are_shared() -> None:
    crowd = Crowd(queue_of(1, max_waiting=8, share=0.75))
    await crowd.come(*(f"a{number}" for number in range(8)))
    assert crowd.queue.num_waiting == 6
    with pytest.raises(QueueFull, match=r"share of the films that wait is used up \(6\)"):
        await crowd.tasks["a7"]
    await crowd.come("b1", "b2", "c1")
    assert crowd.queue.num_waiting == 8
    with pytest.raises(QueueFull, match=r"used up \(1\)"):
        await crowd.tasks["b2"]
    await crowd.come("d1")
    with pytest.raises(QueueFull, match="Too many films are waiting"):
        await crowd.tasks["d1"]
    await crowd.cancel("a3")
    await crowd.come("d2")
    assert crowd.queue.num_waiting == 8
    await crowd.go()


async def test_wait_has_an_end() -> None:
    queue = FairQueue(1, "films", max_waiting=8, wait_seconds=0.01)
    with await queue.enter("a"):
        with pytest.raises(QueueFull, match=r"kept this one waiting for 0\.01 seconds; try again later"):
            await queue.enter("b")
        assert (queue.weight, queue.num_waiting) == (1, 0)
    assert queue.weight == 0


async def test_turn_that_was_granted_to_a_task_cancelled_meanwhile_is_not_lost() -> None:
    crowd = Crowd(queue_of(1))
    await crowd.come("a1", "b1", "c1")
    leaving = asyncio.ensure_future(crowd.leave("a1"))
    await asyncio.sleep(0)
    assert crowd.queue.num_waiting == 1
    assert crowd.served == ["a1"]
    crowd.tasks["b1"].cancel()  # its turn is granted, and it has not run yet
    await leaving
    assert crowd.served == ["a1", "c1"]
    await crowd.go()


async def test_cancelled_wait_leaves_the_queue_at_once() -> None:
    crowd = Crowd(queue_of(10))
    await crowd.come("a1", weight=6)
    await crowd.come("b1", weight=8)
    await crowd.come("c1")
    crowd.tasks["b1"].cancel()
    assert crowd.queue.num_waiting == 1
    await settle()
    assert crowd.served == ["a1", "c1"]
    await crowd.go()


async def test_all_that_wait_can_be_refused() -> None:
    crowd = Crowd(queue_of(1))
    await crowd.come("a1", "b1")
    crowd.queue.refuse(Draining("gone"))
    assert crowd.queue.num_waiting == 0
    await settle()
    with pytest.raises(Draining):
        await crowd.tasks["b1"]
    await crowd.leave("a1")
    await crowd.come("c1")
    assert crowd.served == ["a1", "c1"]
    await crowd.go()


async def test_of_clients_never_served_the_first_goes_first() -> None:
    """Also if another client had come before, and left."""
    crowd = Crowd(queue_of(1))
    await crowd.come("b1", "a1", "c1", "a2")
    await crowd.cancel("a1")
    await crowd.leave("b1")
    assert crowd.served == ["b1", "c1"]
    await crowd.go()


async def test_capacity_may_change() -> None:
    crowd = Crowd(queue_of(0))
    await crowd.come("a1", "b1", "c1")
    assert crowd.served == []
    crowd.queue.grow(2)
    await settle()
    assert crowd.served == ["a1", "b1"]
    crowd.queue.grow(-1)
    await crowd.leave("a1")
    assert crowd.served == ["a1", "b1"]
    await crowd.leave("b1")
    assert crowd.served == ["a1", "b1", "c1"]
    await crowd.go()


async def test_turn_ends_once() -> None:
    queue = queue_of(1)
    turn = await queue.enter("a")
    turn.leave()
    turn.leave()
    assert queue.weight == 0


@dataclass
class Model:
    """What a queue of few lines would do: all that hold and wait are in plain lists, by name."""

    capacity: int
    client_capacity: int
    max_waiting: int
    share: float
    weights: dict[str, int] = field(default_factory=dict)
    priorities: dict[str, int] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    holding: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    served: list[str] = field(default_factory=list)

    def come(self, name: str, weight: int, priority: int, rank: int) -> None:
        self.weights[name], self.priorities[name], self.ranks[name] = weight, priority, rank
        self.waiting.append(name)
        self.advance()
        num_own = sum(other[0] == name[0] for other in self.waiting)
        num_left = self.max_waiting - len(self.waiting) + num_own
        if name in self.waiting and (num_own > num_left or num_own > max(1, self.share * num_left)):
            self.waiting.remove(name)
            self.refused.add(name)

    def go(self, name: str) -> None:
        for line in (self.holding, self.waiting):
            if name in line:
                line.remove(name)
        self.advance()

    def advance(self) -> None:
        while self.waiting:
            held = Counter({client: self.weight_of(client) for client in "abcd"})
            lines = sorted(self.waiting, key=self.ranks.__getitem__)
            heads = {name[0]: name for name in reversed(lines)}
            rooms = {client: self.client_capacity - held[client] for client in heads}
            weights = {
                name: rooms[client] if rooms[client] * 2 >= self.client_capacity else self.weights[name]
                for client, name in heads.items()
            }
            weights = {name: min(weight, self.weights[name]) for name, weight in weights.items()}
            free = [name for client, name in heads.items() if weights[name] <= rooms[client]]
            if not free:
                return
            order = [name[0] for name in self.served]
            chosen = min(
                free,
                key=lambda name: (
                    held[name[0]] / self.priorities[name],
                    len(order) - order[::-1].index(name[0]) if name[0] in order else 0,
                    self.waiting.index(name),
                ),
            )
            if held.total() and held.total() + weights[chosen] > self.capacity:
                return
            self.weights[chosen] = weights[chosen]
            self.waiting.remove(chosen)
            self.holding.append(chosen)
            self.served.append(chosen)

    def weight_of(self, client: str) -> int:
        return sum(self.weights[name] for name in self.holding if name[0] == client)


PRIORITIES = {"a": 1, "b": 1, "c": 2, "d": 5}
COMES = st.tuples(st.sampled_from("abcd"), st.integers(1, 3), st.integers(-1, 1))
"""A client comes, with a weight and a rank; a number instead is who goes: the task with this number, whatever it does."""


@given(
    st.lists(st.one_of(COMES, COMES, st.integers(0, 40)), min_size=20, max_size=60),
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(1, 12),
    st.sampled_from([0.5, 0.75, 1.0]),
)
def test_queue_does_what_its_model_does(
    script: list[tuple[str, int, int] | int], capacity: int, client_capacity: int, max_waiting: int, share: float
) -> None:
    async def play() -> None:
        crowd = Crowd(queue_of(capacity, client_capacity, max_waiting, share))
        model = Model(capacity, client_capacity, max_waiting, share)
        for step in script:
            if isinstance(step, tuple):
                client, weight, rank = step
                name = f"{client}{len(crowd.tasks)}"
                await crowd.come(name, weight=weight, priority=PRIORITIES[client], rank=rank)
                model.come(name, weight, PRIORITIES[client], rank)
            elif step < len(crowd.tasks):
                name = list(crowd.tasks)[step]
                await (crowd.leave(name) if name in model.holding else crowd.cancel(name))
                model.go(name)
            refused = {
                name for name, task in crowd.tasks.items() if task.done() and not task.cancelled() and task.exception()
            }
            # Of turns that are granted in one step, the newcomer's is seen first, whichever came first.
            assert (sorted(crowd.served), refused) == (sorted(model.served), model.refused)
            assert crowd.queue.num_waiting == len(model.waiting)
            assert crowd.queue.weight == sum(model.weight_of(client) for client in "abcd")
        await crowd.go()

    asyncio.run(play())


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.booleans()), min_size=10, max_size=40),
    st.integers(1, 4),
)
def test_no_turn_is_lost_or_made_whatever_happens_at_once(script: list[tuple[str, int, bool]], capacity: int) -> None:
    async def hold(queue: FairQueue, client: str, gone: asyncio.Event) -> None:
        with await queue.enter(client):
            assert queue.weight <= capacity
            await gone.wait()

    async def play() -> None:
        queue = queue_of(capacity)
        tasks: list[asyncio.Task[None]] = []
        gone: list[asyncio.Event] = []
        for index, (client, num_rounds, is_cancelled) in enumerate(script):
            gone.append(asyncio.Event())
            tasks.append(asyncio.create_task(hold(queue, client, gone[-1])))
            if is_cancelled:
                tasks[index // 2].cancel()
            else:
                gone[index // 2].set()
            for _ in range(num_rounds):
                await asyncio.sleep(0)
        for event in gone:
            event.set()
        async with asyncio.timeout(PATIENT):
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(outcome is None or isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
        assert (queue.weight, queue.num_waiting) == (0, 0)

    asyncio.run(play())

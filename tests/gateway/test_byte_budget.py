"""Encoded bytes in flight have one bound, shared fairly, and waiting for them ends."""

import asyncio

import pytest

from saccade.errors import BodyTooLarge, QueueFull
from saccade.gateway.byte_budget import ByteBudget


async def test_bytes_go_back_at_the_end() -> None:
    budget = ByteBudget(100)
    with budget.reservation() as memory:
        await memory.grow(40)
        await memory.grow(10)
        memory.keep(45)
        assert budget.num_bytes == 45
        memory.keep(60)
        assert budget.num_bytes == 45
        memory.take_bytes(30)
        assert budget.num_bytes == 75
    assert budget.num_bytes == 0


async def test_requests_are_served_in_order_without_overtaking() -> None:  # F11
    budget = ByteBudget(100)
    order: list[str] = []
    first = budget.reservation("a")
    await first.grow(80)

    async def reserve(client: str, nbytes: int) -> None:
        await budget.reservation(client).grow(nbytes)
        order.append(client)

    waiting = [asyncio.create_task(reserve(client, nbytes)) for client, nbytes in (("b", 90), ("c", 10))]
    await asyncio.sleep(0.01)
    assert order == []
    first.keep(0)
    await asyncio.gather(*waiting)
    assert order == ["b", "c"]


async def test_a_client_at_its_share_waits_and_holds_up_nobody_else() -> None:  # F11
    budget = ByteBudget(100, wait_seconds=0.05)
    greedy = budget.reservation("greedy")
    await greedy.grow(50)
    with pytest.raises(QueueFull):
        await budget.reservation("greedy").grow(1)
    waiting = asyncio.create_task(budget.reservation("greedy").grow(1))
    await asyncio.sleep(0)
    await budget.reservation("modest").grow(50)
    with pytest.raises(QueueFull):
        await waiting
    assert budget.num_bytes == 100


async def test_a_request_alone_may_grow_beyond_its_clients_share() -> None:
    budget = ByteBudget(100, wait_seconds=0.05)
    alone = budget.reservation("a")
    for _ in range(4):
        await alone.grow(25)
    with pytest.raises(BodyTooLarge):
        await alone.grow(1)
    assert budget.num_bytes == 100


async def test_two_that_hold_bytes_and_wait_for_more_both_end() -> None:  # F11
    budget = ByteBudget(100, wait_seconds=0.05)
    held = [budget.reservation(client) for client in "ab"]
    for memory in held:
        await memory.grow(40)
    ends = await asyncio.gather(*(memory.grow(40) for memory in held), return_exceptions=True)
    assert [type(end) for end in ends] == [QueueFull, QueueFull]
    assert budget.num_bytes == 80


async def test_more_than_there_is_in_all_is_refused_at_once() -> None:
    budget = ByteBudget(100)
    with pytest.raises(BodyTooLarge):
        await budget.reservation().grow(101)
    await budget.reservation().grow(100)


@pytest.mark.parametrize("is_granted", [False, True], ids=["before its grant", "in the round of its grant"])
async def test_cancelled_request_holds_nothing(is_granted: bool) -> None:
    budget = ByteBudget(100)
    first = budget.reservation("a")
    await first.grow(100)
    waiting = asyncio.create_task(budget.reservation("b").grow(10))
    behind = asyncio.create_task(budget.reservation("c").grow(95))
    await asyncio.sleep(0)
    if is_granted:
        first.keep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    first.keep(0)
    await behind
    assert budget.num_bytes == 95


async def test_unreserved_bytes_report_an_overrun() -> None:
    budget = ByteBudget(100)
    mine, others = budget.reservation("mine"), budget.reservation("others")
    mine.take_bytes(50)
    assert not mine.is_over
    mine.take_bytes(1)
    assert (mine.is_over, others.is_over) == (True, False)
    others.take_bytes(50)
    assert others.is_over
    mine.keep(0)
    assert not others.is_over

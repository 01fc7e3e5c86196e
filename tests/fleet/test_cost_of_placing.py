"""A request's place takes as many steps for a thousand workers as for two."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from random import Random
from types import FrameType
from typing import Any

import pytest
from fronts import DESCRIPTION
from stub_worker import stub
from tables import table
from waiting import until

from saccade.fleet.cost import Policy
from saccade.fleet.dispatch import Dispatcher
from saccade.fleet.index import BlockIndex, Partition
from saccade.fleet.pool import WorkerPool
from saccade.fleet.prompt import Prompt
from saccade.fleet.router import Router
from saccade.fleet.settings import DispatchLimits
from saccade.protocol.kv_events import KvEvents

PROMPT = Prompt(list(range(200)))


def dispatcher_of(num_workers: int, limits: DispatchLimits, policy: Policy = "cost") -> Dispatcher:
    """A fleet whose caches are known to be empty, asked once already."""
    worker_pool, index = WorkerPool((), lambda _: None), BlockIndex(1 << 30)
    for number in range(num_workers):
        worker_pool.add(stub(f"unix:/{number}", DESCRIPTION))
        index.begin(
            f"unix:/{number}", Partition(DESCRIPTION.fingerprint, DESCRIPTION.block_size), resumes_at_states=False
        )
        index.take(f"unix:/{number}", KvEvents(0, [], snapshot=True))
    return Dispatcher(worker_pool, Router(policy, index, Random(0)), limits=limits)


async def calls_of(step: Callable[[], Awaitable[Any]]) -> int:
    """How many Python functions *step* enters."""
    count = 0

    def profile(_: FrameType, event: str, __: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        await step()
    finally:
        sys.setprofile(None)
    return count


async def calls_of_placing(num_workers: int, policy: Policy) -> int:
    dispatcher = dispatcher_of(num_workers, DispatchLimits(), policy)

    async def place() -> None:
        async with dispatcher.place("m", PROMPT):
            pass

    await place()
    # A first use of a worker counts for nothing.
    dispatcher.num_placed.update({f"unix:/{number}": 1 for number in range(num_workers)})
    # What time brings, such as an expectation that ends, comes in one of several runs at most.
    return min([await calls_of(place) for _ in range(3)])


@table("policy", ["cost", "round_robin", "consistent_hash"])
async def test_placing_takes_as_many_calls_for_a_thousand_workers_as_for_two(policy: Policy) -> None:
    assert await calls_of_placing(2, policy) == await calls_of_placing(1000, policy)


@pytest.mark.ci
async def test_an_end_with_waiting_tenants_takes_no_more_calls_for_many_workers_than_for_four() -> None:
    async def calls_of_an_end(num_workers: int) -> int:
        limits = DispatchLimits(worker_queue=0, num_processes=DESCRIPTION.max_num_seqs, max_waiting=200)
        dispatcher, ends, ended = dispatcher_of(num_workers, limits), asyncio.Event(), list[int]()

        async def hold(number: int) -> None:
            async with dispatcher.place("m", Prompt([1], tenant=bytes([number % 64]))):
                await ends.wait()

        held = dispatcher.place("m", Prompt([1], tenant=b"first"))
        await held.__aenter__()
        tasks = [asyncio.create_task(hold(number)) for number in range(num_workers + 63)]
        await until(lambda: dispatcher.num_waiting == 64)

        async def end() -> None:
            ended.append(await held.__aexit__(None, None, None) is True)

        calls = await calls_of(end)
        ends.set()
        await asyncio.gather(*tasks)
        return calls

    # A call more or less is the event loop's; 60 workers more would be 60 calls at least.
    assert await calls_of_an_end(64) <= await calls_of_an_end(4) + 5

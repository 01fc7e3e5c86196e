"""Steps that belong together end together."""

import asyncio

import pytest

from saccade.concurrency import all_or_none
from saccade.errors import InvalidImage


async def test_failed_task_cancels_the_others() -> None:
    ended: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("sibling")

    async def fail() -> None:
        await asyncio.sleep(0)
        raise InvalidImage("no image")

    with pytest.raises(InvalidImage):
        await all_or_none([wait(), fail(), wait()])
    assert ended == ["sibling"] * 2
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_cancellation_ends_all_tasks() -> None:
    ended = asyncio.Event()

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    together = asyncio.create_task(all_or_none([wait()]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    together.cancel()
    with pytest.raises(asyncio.CancelledError):
        await together
    assert ended.is_set()

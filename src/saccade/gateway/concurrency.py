"""Work side by side, of which one failure ends all."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def all_or_none(steps: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run *steps* side by side and return their results. If one raises, cancel the others and raise its error.

    No step runs any longer when this returns or raises.
    """
    tasks = [asyncio.ensure_future(step) for step in steps]
    try:
        # Not a TaskGroup: in Python 3.11 its frame holds the error of its own cancellation, and all below it stays
        # until the collector runs.
        return await asyncio.gather(*tasks)
    finally:
        await end_all(tasks)


async def end_all(tasks: list[asyncio.Task[Any]]) -> None:
    """Cancel *tasks*, wait until they have ended, and empty the list.

    An error holds the frame that has the list, and a task holds its error.
    """
    try:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        tasks.clear()

"""Runs steps concurrently, and ends all of them if one fails."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from saccade.transport import lasting_task

T = TypeVar("T")


async def all_or_none(steps: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run *steps* concurrently and return their results. If one raises, cancel the others and raise its error.

    All steps have ended when this returns or raises. A single step runs in the caller's task.
    """
    coroutines = list(steps)
    if len(coroutines) < 2:
        return [await step for step in coroutines]
    tasks = [asyncio.ensure_future(step) for step in coroutines]
    try:
        # Not a TaskGroup: in Python 3.11 its frame holds the error of its own cancellation, and all below it stays
        # until the collector runs.
        return await asyncio.gather(*tasks)
    finally:
        await end_all(tasks)


async def end_all(tasks: list[asyncio.Task[Any]]) -> None:
    """Cancel *tasks*, wait until they have ended, and empty the list.

    Emptying the list breaks a reference cycle: a task holds its error, and the error holds the frame that has the list.
    """
    try:
        await lasting_task.end(*tasks)
    finally:
        tasks.clear()

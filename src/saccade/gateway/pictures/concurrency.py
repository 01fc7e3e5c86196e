"""Pictures side by side: steps of which one failure ends all."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


async def all_or_none(steps: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run *steps* side by side until all are done. Where one raises, the others are cancelled and its error is raised.

    No step runs any longer when this returns or raises.
    """
    try:
        async with asyncio.TaskGroup() as group:
            for step in steps:
                group.create_task(step)
    except BaseExceptionGroup as failures:
        # The step that failed first: the errors of the cancelled steps do not tell the cause.
        first = failures.exceptions[0]
        raise first from first.__cause__

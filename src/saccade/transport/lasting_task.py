"""Runs tasks that last until they are cancelled, and ends tasks.

Nothing awaits a lasting task, so an error that ends it would go unnoticed.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

FIRST_PAUSE_SECONDS = 1.0
LAST_PAUSE_SECONDS = 60.0

logger = logging.getLogger(__name__)


def begin(work: Callable[[], Coroutine[Any, Any, None]], name: str) -> asyncio.Task[None]:
    """Run *work* in a task. If an error ends it, log the error as critical, and begin *work* again after a pause.

    The pause doubles from FIRST_PAUSE_SECONDS to LAST_PAUSE_SECONDS with each error. It is short again once *work* has
    run for longer than LAST_PAUSE_SECONDS.
    """
    return asyncio.create_task(_keep_running(work, name), name=name)


async def end(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancel *tasks*, and wait until all have ended. None stands for a task that has not begun."""
    begun = [task for task in tasks if task is not None]
    for task in begun:
        task.cancel()
    if begun:
        await asyncio.gather(*begun, return_exceptions=True)


async def until_one_ends(*parts: Coroutine[Any, Any, None]) -> None:
    """Run *parts* concurrently until one ends, and cancel the others. Raises the error that ended it."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await end(*tasks)


async def _keep_running(work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
    now = asyncio.get_running_loop().time
    pause = FIRST_PAUSE_SECONDS
    while True:
        began = now()
        try:
            await work()
        except Exception:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                # Whoever cancelled it waits for its end.
                logger.critical("%s met an unforeseen error at its end", name, exc_info=True)
                return
            if now() - began > LAST_PAUSE_SECONDS:
                pause = FIRST_PAUSE_SECONDS
            logger.critical("%s met an unforeseen error, and begins again in %g s", name, pause, exc_info=True)
        else:
            return
        await asyncio.sleep(pause)
        pause = min(2 * pause, LAST_PAUSE_SECONDS)

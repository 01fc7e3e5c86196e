"""A client that leaves ends the work that is done for it."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive


async def unless_disconnected(
    receive: Receive, work: Coroutine[Any, Any, None], *beside: Coroutine[Any, Any, None]
) -> bool:
    """Run *work*, and *beside* as long; cancel all when the client leaves. Return whether *work* was done."""
    tasks = [asyncio.ensure_future(part) for part in (work, _disconnect(receive), *beside)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if not task.cancelled():
            task.result()
    return not tasks[0].cancelled()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

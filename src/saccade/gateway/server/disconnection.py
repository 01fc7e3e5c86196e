"""Work for a client that may leave before it is done."""

import asyncio
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

from starlette.types import Receive

from saccade.gateway.server.body import ClientDisconnected

T = TypeVar("T")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of *work* for a request whose body has been read; cancel it when the client disconnects.

    Raises ClientDisconnected then, and what *work* raises.
    """
    return await beside(work, _disconnect(receive))


async def beside(work: Coroutine[Any, Any, T], guard: Coroutine[Any, Any, NoReturn]) -> T:
    """Return the result of *work*, or raise what it raises; cancel it when *guard* raises, and raise that."""
    tasks = working, guarding = asyncio.ensure_future(work), asyncio.ensure_future(guard)
    try:
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return guarding.result() if working.cancelled() else working.result()
    finally:
        # An error would hold this frame, which would hold the task that holds the error.
        del tasks, task, working, guarding


async def _disconnect(receive: Receive) -> NoReturn:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnected

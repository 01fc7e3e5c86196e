"""Pictures side by side: steps of which one failure ends all, and work that several requests want done once."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

K = TypeVar("K")
T = TypeVar("T")


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
        raise failures.exceptions[0] from None


@dataclass
class _Flight(Generic[T]):
    """Work under way, and how many requests wait for it."""

    task: asyncio.Task[T]
    num_waiting: int = 0


class SingleFlight(Generic[K, T]):
    """Work under way, by key. When the last request that waits for it leaves, the work is cancelled."""

    def __init__(self) -> None:
        self._flights: dict[K, _Flight[T]] = {}

    def __contains__(self, key: K) -> bool:
        """Whether a request waits for *key*, or has not yet received the result."""
        return key in self._flights

    async def join(self, key: K, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of *work*, or of the work under way for *key*. Raises what the work raises."""
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.create_task(work(), name="shared work"))
        flight.num_waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.num_waiting -= 1
            if flight.num_waiting == 0:
                del self._flights[key]
                flight.task.cancel()

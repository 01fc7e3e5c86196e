"""Work that several requests want at the same time is done once."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

K = TypeVar("K")
T = TypeVar("T")


@dataclass
class _Flight(Generic[T]):
    """Work under way, and how many wait for it."""

    task: asyncio.Task[T]
    num_waiting: int = 0


class SingleFlight(Generic[K, T]):
    """Work under way, by key. It goes on while anybody waits for it; the last one that leaves ends it."""

    def __init__(self) -> None:
        self._flights: dict[K, _Flight[T]] = {}

    def __contains__(self, key: K) -> bool:
        """Whether somebody waits for *key*, or has not yet been handed what came of it."""
        return key in self._flights

    async def join(self, key: K, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return what comes of *work*, or of that which is under way for *key*. Raises what it raises."""
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

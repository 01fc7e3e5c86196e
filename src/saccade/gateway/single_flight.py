"""Lets several requests share the same work, such as a fetch."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, TypeVarTuple

K = TypeVar("K")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@dataclass
class _Flight(Generic[T]):
    """Work in progress, and how many requests wait for it."""

    task: asyncio.Task[T]
    num_waiting: int = 0


class SingleFlight(Generic[K, T]):
    """Shares work in progress among requests with the same key. When the last one leaves, the work is cancelled."""

    def __init__(self) -> None:
        self._flights: dict[K, _Flight[T]] = {}

    def __contains__(self, key: K) -> bool:
        """Return whether a request waits for *key*, or has not yet received the result."""
        return key in self._flights

    async def join(self, key: K, work: Callable[[*Ts], Coroutine[Any, Any, T]], *args: *Ts) -> T:
        """Return the result of *work* on *args*, or of work already in progress for *key*. Raises its errors."""
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.create_task(work(*args), name="shared work"))
        flight.num_waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.num_waiting -= 1
            if flight.num_waiting == 0:
                del self._flights[key]
                flight.task.cancel()

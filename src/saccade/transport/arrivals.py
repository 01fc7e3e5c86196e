"""Hands over what arrives from a worker, so that a burst does not hold up the event loop."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")

TURN_SECONDS = 0.002
"""How long items are handed over at a time."""


class Arrivals(Generic[T]):
    """Calls *take* with each item, in order. If that takes longer than TURN_SECONDS, others run on the loop first."""

    def __init__(self, take: Callable[[T], object]) -> None:
        self._take = take
        self._waiting: deque[T] = deque()

    def add(self, items: Iterable[T]) -> None:
        """Hand over *items* after those that wait."""
        is_late = bool(self._waiting)
        self._waiting += items
        if not is_late:
            self._hand_over()

    def finish(self) -> None:
        """Hand over all that wait, at once."""
        while self._waiting:
            self._take(self._waiting.popleft())

    def _hand_over(self) -> None:
        deadline = time.monotonic() + TURN_SECONDS
        while self._waiting:
            self._take(self._waiting.popleft())
            if self._waiting and time.monotonic() > deadline:
                asyncio.get_running_loop().call_soon(self._hand_over)
                return

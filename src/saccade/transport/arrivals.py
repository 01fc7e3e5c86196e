"""Hands over items that arrive from a worker, so that a burst does not hold up the event loop."""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)

TURN_SECONDS = 0.002
"""How long items are handed over at a time."""


class Arrivals(Generic[T]):
    """Calls *take* with each item, in order. After TURN_SECONDS it lets other tasks run before it goes on.

    If *take* raises an error for an item, the error is logged, and later items are still handed over.
    """

    def __init__(self, take: Callable[[T], object]) -> None:
        self._take = take
        self._waiting: deque[T] = deque()

    def add(self, items: Iterable[T]) -> None:
        """Hand over *items* after the waiting ones."""
        is_late = bool(self._waiting)
        self._waiting += items
        if not is_late:
            self._hand_over()

    def finish(self) -> None:
        """Hand over all waiting items at once."""
        self._take_until(math.inf)

    def _hand_over(self) -> None:
        self._take_until(time.monotonic() + TURN_SECONDS)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._hand_over)

    def _take_until(self, deadline: float) -> None:
        while self._waiting:
            item = self._waiting.popleft()
            try:
                self._take(item)
            except Exception:
                logger.critical("what arrived from a worker met an unforeseen error", exc_info=True)
            if self._waiting and time.monotonic() > deadline:
                return

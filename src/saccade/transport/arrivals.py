"""Hands over what arrives from a worker, so that a burst does not hold up the event loop."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)

TURN_SECONDS = 0.002
"""How long items are handed over at a time."""


class Arrivals(Generic[T]):
    """Calls *take* with each item, in order. If that takes longer than TURN_SECONDS, others run on the loop first.

    An item for which *take* raises an error keeps none of those after it.
    """

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
            self._take_next()

    def _hand_over(self) -> None:
        deadline = time.monotonic() + TURN_SECONDS
        while self._waiting:
            self._take_next()
            if self._waiting and time.monotonic() > deadline:
                asyncio.get_running_loop().call_soon(self._hand_over)
                return

    def _take_next(self) -> None:
        try:
            self._take(self._waiting.popleft())
        except Exception:
            logger.critical("what arrived from a worker met an unforeseen error", exc_info=True)

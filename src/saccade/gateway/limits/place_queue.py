"""A bounded queue of requests that wait because every worker has as much as it may have."""

import asyncio
import contextlib
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable

from saccade.errors import QueueFull

LOOK_SECONDS = 1.0
"""How often one who waits looks again by itself: a place may come with time alone, as that of a breaker's trial."""


class _Line:
    """Those who wait for the same workers, the first first; *num_entering* have left the line and take a place now."""

    def __init__(self) -> None:
        self.waiting: deque[asyncio.Event] = deque()
        self.num_entering = 0


class PlaceQueue:
    """At most *max_waiting* requests wait, each for at most *wait_seconds*. Requests of one line go on in order."""

    def __init__(self, max_waiting: int, wait_seconds: float) -> None:
        self._max_waiting = max_waiting
        self._wait_seconds = wait_seconds
        self._lines: defaultdict[str, _Line] = defaultdict(_Line)

    @property
    def num_waiting(self) -> int:
        return sum(len(line.waiting) for line in self._lines.values())

    @contextlib.asynccontextmanager
    async def turn(self, name: str, num_free: Callable[[], int]) -> AsyncIterator[None]:
        """Run the block, which takes a place, as soon as there is one for this request of the line *name*.

        *num_free* counts the places; what it raises is raised here. Raises QueueFull where too many wait, and after
        *wait_seconds*.
        """
        line = self._lines[name]
        if line.waiting or num_free() <= line.num_entering:
            await self._wait(line, num_free)
        line.num_entering += 1
        try:
            yield
        finally:
            line.num_entering -= 1
            # The place is there still where the block has failed, and another may have looked meanwhile.
            _call(line)

    def changed(self) -> None:
        """Have those who wait look again: there may be a place."""
        for line in self._lines.values():
            _call(line)

    async def _wait(self, line: _Line, num_free: Callable[[], int]) -> None:
        if self.num_waiting >= self._max_waiting:
            raise QueueFull(
                f"Every worker of the model is busy, and {self._max_waiting} requests are waiting; try again shortly."
            )
        ready = asyncio.Event()
        line.waiting.append(ready)
        try:
            async with asyncio.timeout(self._wait_seconds):
                while line.waiting[0] is not ready or num_free() <= line.num_entering:
                    ready.clear()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(ready.wait(), LOOK_SECONDS)
        except TimeoutError as error:
            raise QueueFull(
                f"No worker of the model became free within {self._wait_seconds:g} seconds; try again shortly."
            ) from error
        finally:
            line.waiting.remove(ready)
            # The next one looks after this one has entered: it is a task of its own.
            _call(line)


def _call(line: _Line) -> None:
    """Have the first one who waits look for a place."""
    if line.waiting:
        line.waiting[0].set()

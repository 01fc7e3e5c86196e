"""How many requests are being served, whether new ones are, and whose turn it is on the event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

from saccade.errors import Draining, QueueFull

TURNS = 4
"""Requests that may work on the event loop between two of its rounds; each takes about a millisecond."""


class Admission:
    """Counts requests in flight; refuses new ones over *max_requests* and after drain()."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._idle = asyncio.Event()
        self._idle.set()
        self._turns = asyncio.Semaphore(TURNS)
        self.num_requests = 0
        self.draining = False

    @contextlib.contextmanager
    def admit(self) -> Iterator[None]:
        """Hold a place while the block runs. Raises Draining and QueueFull."""
        if self.draining:
            raise Draining("The server is shutting down; send the request to another one.")
        if self.num_requests >= self._max_requests:
            raise QueueFull(f"{self._max_requests} requests are being served already; try again shortly.")
        self.num_requests += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_requests -= 1
            if not self.num_requests:
                self._idle.set()

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Hold the block back until few others are in theirs, so that a burst of requests does not stall the loop."""
        async with self._turns:
            yield
            # Without a round of the loop in between, all that wait would run in one.
            await asyncio.sleep(0)

    async def drain(self, timeout_seconds: float) -> bool:
        """Take no new requests and wait for the others; return whether all ended in time."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._idle.wait()
        return not self.num_requests

"""Share a bounded number of turns fairly between clients, so that slow work of one client does not block others."""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager

from saccade.errors import QueueFull


class FairTurns:
    """At most *num_turns* `async with` blocks run at a time, at most *max_per_client* of one client (None: no bound).

    A free turn goes to the waiting client with the fewest turns, among equals to the client that was served longest
    ago. The blocks of one client are served in order of arrival. A single client may use every turn up to its bound.
    """

    def __init__(self, num_turns: int, max_per_client: int | None = None) -> None:
        self._num_free = num_turns
        self._max_per_client = num_turns if max_per_client is None else max_per_client
        self._held: Counter[Hashable] = Counter()
        self._waiting: OrderedDict[Hashable, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def num_held(self) -> int:
        """Number of turns in use."""
        return self._held.total()

    @property
    def num_waiting(self) -> int:
        """Number of blocks that wait for a turn."""
        return sum(len(line) for line in self._waiting.values())

    @asynccontextmanager
    async def turn(self, client: Hashable, timeout_seconds: float) -> AsyncIterator[None]:
        """Run the block in a turn of *client*. Raises QueueFull if no turn is free within *timeout_seconds*."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._acquire(client)
        except TimeoutError:
            raise QueueFull("Too many images are being fetched; try again later.") from None
        try:
            yield
        finally:
            self._release(client)

    async def _acquire(self, client: Hashable) -> None:
        granted = asyncio.get_running_loop().create_future()
        line = self._waiting.setdefault(client, deque())
        line.append(granted)
        self._grant()
        try:
            await granted
        except asyncio.CancelledError:
            if not granted.cancelled():
                self._release(client)
            elif granted in line:
                line.remove(granted)
                if not line:
                    del self._waiting[client]
            raise

    def _release(self, client: Hashable) -> None:
        self._num_free += 1
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]
        self._grant()

    def _grant(self) -> None:
        while self._num_free:
            clients = [client for client in self._waiting if self._held[client] < self._max_per_client]
            if not clients:
                return
            client = min(clients, key=self._held.__getitem__)
            line = self._waiting[client]
            granted = line.popleft()
            if not line:
                del self._waiting[client]
            if granted.cancelled():  # its task has not run yet to remove it
                continue
            if line:
                self._waiting.move_to_end(client)
            granted.set_result(None)
            self._held[client] += 1
            self._num_free -= 1

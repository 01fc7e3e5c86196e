"""Shares a bounded number of turns fairly between tenants: slow work of one tenant does not keep out another's."""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from saccade.errors import QueueFull


class FairTurns:
    """At most *num_turns* blocks run at a time, at most *max_per_tenant* of them for one tenant (without it: all).

    A turn that becomes free goes to the waiting tenant with the fewest turns, among equals to the one that was served
    longest ago; within a tenant the first to wait is the first served. A tenant alone may use every turn up to its
    bound.
    """

    def __init__(self, num_turns: int, max_per_tenant: int | None = None) -> None:
        self._num_free = num_turns
        self._max_per_tenant = num_turns if max_per_tenant is None else max_per_tenant
        self._held: Counter[bytes] = Counter()
        self._waiting: OrderedDict[bytes, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def num_held(self) -> int:
        """Turns that are taken."""
        return self._held.total()

    @property
    def num_waiting(self) -> int:
        """Blocks that wait for a turn."""
        return sum(len(line) for line in self._waiting.values())

    @asynccontextmanager
    async def turn(self, tenant: bytes, timeout_seconds: float) -> AsyncIterator[None]:
        """Run the block in a turn of *tenant*. Raises QueueFull where none was free within *timeout_seconds*."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._acquire(tenant)
        except TimeoutError:
            raise QueueFull("Too many images are being fetched; try again later.") from None
        try:
            yield
        finally:
            self._release(tenant)

    async def _acquire(self, tenant: bytes) -> None:
        granted = asyncio.get_running_loop().create_future()
        line = self._waiting.setdefault(tenant, deque())
        line.append(granted)
        self._grant()
        try:
            await granted
        except asyncio.CancelledError:
            if not granted.cancelled():
                self._release(tenant)
            elif granted in line:
                line.remove(granted)
                if not line:
                    del self._waiting[tenant]
            raise

    def _release(self, tenant: bytes) -> None:
        self._num_free += 1
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        self._grant()

    def _grant(self) -> None:
        while self._num_free:
            tenants = [tenant for tenant in self._waiting if self._held[tenant] < self._max_per_tenant]
            if not tenants:
                return
            tenant = min(tenants, key=self._held.__getitem__)
            line = self._waiting[tenant]
            granted = line.popleft()
            if not line:
                del self._waiting[tenant]
            if granted.cancelled():  # its task has not yet run to take it out of the line
                continue
            if line:
                self._waiting.move_to_end(tenant)
            granted.set_result(None)
            self._held[tenant] += 1
            self._num_free -= 1

"""A bounded queue of requests that wait because every worker has as much as it may have, fair between tenants."""

import asyncio
import contextlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

from saccade.errors import QueueFull
from saccade.gateway.tenants.account import EVERYBODY, Tenant

LOOK_SECONDS = 1.0
"""How often one who waits looks again by itself: a place may come with time alone, as that of a breaker's trial."""


@dataclass(eq=False)
class _Waiter:
    """A request of *tenant* that waits. *called*: it looks again; *is_displaced*: another tenant's has its place."""

    tenant: Tenant
    called: asyncio.Event = field(default_factory=asyncio.Event)
    is_displaced: bool = False


class _Line:
    """Those who wait for the same workers, by the tenant's id; *num_entering* have left the line and take a place now.

    The next one is the first of the tenant that holds the fewest places for its priority; of several such tenants, that
    which was served longest ago.
    """

    def __init__(self) -> None:
        self.num_entering = 0
        self.held: Counter[bytes] = Counter()
        self.waiting: OrderedDict[bytes, deque[_Waiter]] = OrderedDict()

    def add(self, waiter: _Waiter) -> None:
        self.waiting.setdefault(waiter.tenant.id, deque()).append(waiter)

    def remove(self, waiter: _Waiter) -> None:
        """Take *waiter* out of the line, if it is there."""
        of_tenant = self.waiting.get(waiter.tenant.id, deque())
        if waiter in of_tenant:
            of_tenant.remove(waiter)
        if not of_tenant:
            self.waiting.pop(waiter.tenant.id, None)

    def next(self) -> _Waiter | None:
        firsts = [of_tenant[0] for of_tenant in self.waiting.values()]
        # min() takes the first of equals, and the order of the tenants is that in which they were served.
        return min(firsts, key=lambda first: self.held[first.tenant.id] / first.tenant.priority, default=None)

    def call(self) -> None:
        """Have the next one look for a place."""
        waiter = self.next()
        if waiter is not None:
            waiter.called.set()

    @contextlib.contextmanager
    def holding(self, tenant: Tenant) -> Iterator[None]:
        self.held[tenant.id] += 1
        if tenant.id in self.waiting:
            self.waiting.move_to_end(tenant.id)
        try:
            yield
        finally:
            self.held[tenant.id] -= 1
            if not self.held[tenant.id]:
                del self.held[tenant.id]
            # Who is next may have changed with it.
            self.call()


class PlaceQueue:
    """At most *max_waiting* requests wait, each for at most *wait_seconds*. Requests of one tenant go on in order.

    Where the queue is full, a request takes the place of the last one of the tenant with the most waiting requests for
    its priority, if its own tenant has fewer.
    """

    def __init__(self, max_waiting: int, wait_seconds: float) -> None:
        self._max_waiting = max_waiting
        self._wait_seconds = wait_seconds
        self._lines: defaultdict[str, _Line] = defaultdict(_Line)

    @property
    def num_waiting(self) -> int:
        return sum(len(of_tenant) for line in self._lines.values() for of_tenant in line.waiting.values())

    def holding(self, name: str, tenant: Tenant) -> contextlib.AbstractContextManager[None]:
        """Count a place of the line *name* as *tenant*'s while the block runs. Enter it within turn()."""
        return self._lines[name].holding(tenant)

    @contextlib.asynccontextmanager
    async def turn(self, name: str, num_free: Callable[[], int], tenant: Tenant = EVERYBODY) -> AsyncIterator[None]:
        """Run the block, which takes a place, as soon as there is one for this request of the line *name*.

        *num_free* counts the places; what it raises is raised here. Raises QueueFull where too many wait, and after
        *wait_seconds*.
        """
        line = self._lines[name]
        if line.waiting or num_free() <= line.num_entering:
            await self._wait(line, num_free, tenant)
        line.num_entering += 1
        try:
            yield
        finally:
            line.num_entering -= 1
            # The place is there still where the block has failed, and another may have looked meanwhile.
            line.call()

    def changed(self) -> None:
        """Have those who wait look again: there may be a place."""
        for line in self._lines.values():
            line.call()

    async def _wait(self, line: _Line, num_free: Callable[[], int], tenant: Tenant) -> None:
        if self.num_waiting >= self._max_waiting:
            self._make_room(tenant)
        waiter = _Waiter(tenant)
        line.add(waiter)
        try:
            async with asyncio.timeout(self._wait_seconds):
                while not waiter.is_displaced and not self._may_enter(line, waiter, num_free):
                    waiter.called.clear()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(waiter.called.wait(), LOOK_SECONDS)
        except TimeoutError as error:
            raise QueueFull(
                f"No worker of the model became free within {self._wait_seconds:g} seconds; try again shortly."
            ) from error
        finally:
            line.remove(waiter)
            # The next one looks after this one has entered: it is a task of its own.
            line.call()
        if waiter.is_displaced:
            raise QueueFull("Every worker is busy, and others with fewer requests came; try again shortly.")

    def _may_enter(self, line: _Line, waiter: _Waiter, num_free: Callable[[], int]) -> bool:
        """Whether *waiter* is next and there is a place. Where another one has become the next, that one is called."""
        if line.next() is waiter:
            return num_free() > line.num_entering
        line.call()
        return False

    def _make_room(self, tenant: Tenant) -> None:
        """Displace a request in favour of one of *tenant*. Raises QueueFull where no other has more waiting."""
        num_waiting: Counter[bytes] = Counter()
        last: dict[bytes, tuple[_Line, _Waiter]] = {}
        for line in self._lines.values():
            for known_as, of_tenant in line.waiting.items():
                num_waiting[known_as] += len(of_tenant)
                last[known_as] = (line, of_tenant[-1])

        def load(known_as: bytes) -> float:
            return num_waiting[known_as] / last[known_as][1].tenant.priority

        most = max(last, key=load, default=tenant.id)
        if most == tenant.id or load(most) <= (num_waiting[tenant.id] + 1) / tenant.priority:
            raise QueueFull(
                f"Every worker of the model is busy, and {self._max_waiting} requests are waiting; try again shortly."
            )
        line, waiter = last[most]
        waiter.is_displaced = True
        line.remove(waiter)
        waiter.called.set()

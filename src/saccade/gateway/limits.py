"""What requests may hold of a gateway: places, turns on the event loop, and bytes.

All requests share one budget for the encoded bytes that they hold: bodies, data: URLs and fetched images. A request
reserves bytes before it reads them and gives them back as soon as it drops them. If there is no room the request waits
in line, until a deadline: without one, two requests that wait for each other's bytes would never end.
"""

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self, TypeVar

from saccade.errors import BodyTooLarge, Draining, QueueFull

TURNS = 2
"""Requests that may work on the event loop between two of its rounds; each takes about a millisecond."""

LARGE_BODY_BYTES = 64 << 10
"""Requests with longer bodies have turns of their own, so that a request with text only does not wait for images."""

HUGE_BODY_BYTES = 2 << 20
"""Requests with longer bodies also have turns of their own to be read, which may last as long as a hundred images."""

READING_SECONDS = 0.005
"""How long a large body that is being read may pause and keep its turn; a slower one is read without."""

THREADS = 2
"""Long texts and large images that are worked on at a time, beside the event loop."""

TENANT_SHARE = 3
"""One of several tenants may hold this many times as many places as are free. So one tenant alone gets three quarters
of the places, two get three sevenths each, and a tenant that comes later finds a place unless there are very many."""

T = TypeVar("T")


class ReadingTurn:
    """A large body's turn to be read, which it loses where its client pauses."""

    def __init__(self, turns: asyncio.Semaphore) -> None:
        self._turns = turns
        self._has_progressed = False
        self._timer: asyncio.TimerHandle | None = None

    async def acquire(self) -> None:
        await self._turns.acquire()
        self._watch()

    def keep(self) -> None:
        """Note that a piece of the body arrived, so the turn is not lost."""
        self._has_progressed = True

    def release(self) -> None:
        """Give the turn back, unless it was lost."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._turns.release()

    def _watch(self) -> None:
        self._has_progressed = False
        self._timer = asyncio.get_running_loop().call_later(READING_SECONDS, self._check_progress)

    def _check_progress(self) -> None:
        if self._has_progressed:
            self._watch()
        else:
            self.release()


class Admission:
    """Counts requests in flight; refuses new ones over *max_requests* and after drain().

    Where *max_tenant_requests* is less, there are several tenants: each holds at most so many of these places, and not
    more than TENANT_SHARE says.
    """

    def __init__(self, max_requests: int, max_tenant_requests: int | None = None) -> None:
        self._max_requests = max_requests
        self._max_tenant_requests = max_requests if max_tenant_requests is None else max_tenant_requests
        self._idle = asyncio.Event()
        self._idle.set()
        self._turns = asyncio.Semaphore(TURNS)
        self._large_turns = asyncio.Semaphore(TURNS)
        self._starts = asyncio.Semaphore(TURNS)
        self._readers = asyncio.Semaphore(TURNS)
        self._huge_readers = asyncio.Semaphore(TURNS)
        self._of_tenants: Counter[bytes] = Counter()
        self.num_requests = 0
        self.draining = False

    def check(self, tenant: bytes) -> None:
        """Raise Draining or QueueFull where admit() would: what cannot be served need not be read."""
        if self.draining:
            raise Draining("The server is shutting down; send the request to another one.")
        if self.num_requests >= self._max_requests:
            raise QueueFull(f"{self._max_requests} requests are being served already; try again shortly.")
        num_own = self._of_tenants[tenant]
        if num_own >= self._max_tenant_requests or self._is_over_share(num_own):
            raise QueueFull(
                f"{num_own} requests with this API key are being served already, which is its share; try again shortly."
            )

    def _is_over_share(self, num_own: int) -> bool:
        are_several = self._max_tenant_requests < self._max_requests
        return are_several and num_own >= TENANT_SHARE * (self._max_requests - self.num_requests)

    @contextlib.contextmanager
    def admit(self, tenant: bytes = b"") -> Iterator[None]:
        """Hold a place while the block runs. Raises Draining and QueueFull."""
        self.check(tenant)
        self.num_requests += 1
        self._of_tenants[tenant] += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_requests -= 1
            self._of_tenants[tenant] -= 1
            if not self._of_tenants[tenant]:
                del self._of_tenants[tenant]
            if not self.num_requests:
                self._idle.set()

    @contextlib.asynccontextmanager
    async def turn(self, num_body_bytes: int) -> AsyncIterator[None]:
        """Hold the block back until few others are in theirs, so that a burst of requests does not stall the loop.

        The block works on the event loop and must not wait: a wait in the block holds up all other requests.
        """
        async with self._large_turns if _is_large(num_body_bytes) else self._turns:
            yield
            # Without a round of the loop in between, all that wait would run in one.
            await asyncio.sleep(0)

    async def start(self, num_body_bytes: int | None) -> None:
        """Return when a request that announces so many bytes may begin: a large one after the large ones before it."""
        if _is_large(num_body_bytes):
            async with self._starts:
                await asyncio.sleep(0)

    @contextlib.asynccontextmanager
    async def reading(self, num_body_bytes: int | None) -> AsyncIterator[ReadingTurn]:
        """Hold back the block, which reads a body of *num_body_bytes*, None where the length is unknown.

        Small bodies do not wait. Large ones take turns; one that pauses loses its turn and is read beside the others.
        """
        is_huge = num_body_bytes is None or num_body_bytes > HUGE_BODY_BYTES
        turn = ReadingTurn(self._huge_readers if is_huge else self._readers)
        if _is_large(num_body_bytes):
            await turn.acquire()
        try:
            yield turn
        finally:
            turn.release()

    async def drain(self, timeout_seconds: float) -> bool:
        """Take no new requests and wait for the others; return whether all ended in time."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._idle.wait()
        return not self.num_requests


class WorkThreads:
    """Runs work that would hold up the event loop; short work takes its turn of *admission*."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="prepare")

    async def run(self, is_long: bool, num_bytes: int, work: Callable[[], T]) -> T:
        """Return what *work* returns: from a thread where it *is_long*, else on the event loop in a turn.

        *num_bytes* are the bytes that it works on, which say whose turns it shares.
        """
        if is_long:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        async with self._admission.turn(num_bytes):
            return work()

    def close(self) -> None:
        """Give up work that has not begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _is_large(num_body_bytes: int | None) -> bool:
    return num_body_bytes is None or num_body_bytes > LARGE_BODY_BYTES


CLIENT_SHARE = 0.5
"""The part of the budget that one client may hold."""


@dataclass(frozen=True)
class _Waiter:
    """A reservation that waits for *nbytes* beside the *num_own* that it has."""

    client: Hashable
    nbytes: int
    num_own: int
    granted: asyncio.Future[None]


class ByteBudget:
    """At most *capacity_bytes* at a time, of which one client holds at most CLIENT_SHARE.

    One request alone may have the whole capacity, whatever its client's share; nothing above it is ever granted. A
    request waits *wait_seconds* for room.
    """

    def __init__(self, capacity_bytes: int, wait_seconds: float = 5.0) -> None:
        self.capacity_bytes = capacity_bytes
        self.num_bytes = 0
        self._wait_seconds = wait_seconds
        self._client_bytes: Counter[Hashable] = Counter()
        self._waiting: deque[_Waiter] = deque()

    def reservation(self, client: Hashable = None) -> "Reservation":
        """Return a reservation of no bytes yet, for a request of *client*."""
        return Reservation(self, client)

    async def reserve(self, client: Hashable, nbytes: int, num_own: int) -> None:
        """Take *nbytes* for a request of *client* that has *num_own*, when there is room.

        Raises QueueFull after the deadline, and BodyTooLarge where there can never be room.
        """
        needed = num_own + nbytes
        if needed > self.capacity_bytes:
            raise BodyTooLarge(f"The request takes {needed} bytes of memory; all together get {self.capacity_bytes}.")
        waiter = _Waiter(client, nbytes, num_own, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._grant()
        try:
            async with asyncio.timeout(self._wait_seconds):
                await waiter.granted
        except BaseException as error:
            # The grant may have come in the same round of the loop as the deadline or the cancellation.
            if waiter.granted.done() and not waiter.granted.cancelled():
                self.give_back(client, nbytes)
            else:
                self._waiting.remove(waiter)
                self._grant()
            if isinstance(error, TimeoutError):
                raise QueueFull("Other requests hold all memory for request bodies; try again shortly.") from error
            raise

    def is_over(self, client: Hashable) -> bool:
        """Whether *client*, or all clients together, hold more than they may."""
        return self.num_bytes > self.capacity_bytes or self._client_bytes[client] > self.capacity_bytes * CLIENT_SHARE

    def take(self, client: Hashable, nbytes: int) -> None:
        """Count *nbytes* of *client* at once, whether or not there is room."""
        self.num_bytes += nbytes
        self._client_bytes[client] += nbytes

    def give_back(self, client: Hashable, nbytes: int) -> None:
        """Return *nbytes* of *client*; requests that wait get them in the order of their arrival."""
        self.num_bytes -= nbytes
        self._client_bytes[client] -= nbytes
        if self._client_bytes[client] <= 0:
            del self._client_bytes[client]
        self._grant()

    def _is_at_share(self, waiter: _Waiter) -> bool:
        client_bytes = self._client_bytes[waiter.client]
        return client_bytes > waiter.num_own and client_bytes + waiter.nbytes > self.capacity_bytes * CLIENT_SHARE

    def _grant(self) -> None:
        """Grant in order of arrival. A client at its share holds up its own requests only."""
        at_share: set[Hashable] = set()
        for waiter in list(self._waiting):
            if waiter.granted.done():
                continue
            if waiter.client in at_share or self._is_at_share(waiter):
                at_share.add(waiter.client)
            elif self.num_bytes + waiter.nbytes > self.capacity_bytes:
                return
            else:
                self._waiting.remove(waiter)
                self.take(waiter.client, waiter.nbytes)
                waiter.granted.set_result(None)


class Reservation:
    """The bytes of one request. A context manager: at its end all go back."""

    def __init__(self, budget: ByteBudget, client: Hashable) -> None:
        self.num_bytes = 0
        self.client = client
        self._budget = budget

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.keep(0)

    async def grow(self, nbytes: int) -> None:
        """Reserve *nbytes* more, waiting for room. Raises QueueFull."""
        await self._budget.reserve(self.client, nbytes, self.num_bytes)
        self.num_bytes += nbytes

    @property
    def is_over(self) -> bool:
        """Whether more is taken than the budget allows; grow() would wait."""
        return self._budget.is_over(self.client)

    def take(self, nbytes: int) -> None:
        """Count *nbytes* more that are in memory already, such as those of a fetch that several requests shared."""
        self._budget.take(self.client, nbytes)
        self.num_bytes += nbytes

    def keep(self, nbytes: int) -> None:
        """Give back all but *nbytes*."""
        surplus = self.num_bytes - nbytes
        if surplus > 0:
            self.num_bytes = nbytes
            self._budget.give_back(self.client, surplus)

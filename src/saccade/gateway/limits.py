"""Limits on what requests hold of a gateway: places, turns on the event loop, and bytes.

All requests share one budget for the bytes that they hold: bodies, data: URLs, fetched images, and answers that wait
for their clients. A request reserves bytes before it reads them and releases them as soon as it drops them. If there is
no room, the request waits until a deadline: without one, two requests that wait for each other's bytes would never end.
"""

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from typing import Self, TypeVar

from saccade.errors import BodyTooLarge, Draining, QueueFull

TURNS = 2
"""Requests that may work in one round of the event loop; each takes about a millisecond."""

LARGE_BODY_BYTES = 64 << 10
"""Requests with longer bodies have separate turns, so that a request with text only does not wait for images."""

HUGE_BODY_BYTES = 2 << 20
"""Longer bodies also have separate turns. Reading one may take as long as a hundred images, parsing it 20 milliseconds:
after the work for one the loop serves others as long, before the next."""

LONG_BODY_BYTES = 128 << 10
"""Longer bodies are parsed in a thread: 128 KiB of tools without content take 14 milliseconds."""

READING_SECONDS = 0.005
"""How long a large body may pause and keep its reading turn; a slower one is read without a turn."""

THREADS = 2
"""Threads for long texts and large images."""

TENANT_SHARE = 3
"""Each of several tenants may hold this many times the number of free places. So a single tenant gets three quarters of
the places, two get three sevenths each, and a later tenant finds a place unless there are very many."""

T = TypeVar("T")


class ReadingTurn:
    """A large body's turn to be read, which it loses if its client pauses."""

    def __init__(self, turns: asyncio.Semaphore) -> None:
        self._turns = turns
        self._has_progressed = False
        self._timer: asyncio.TimerHandle | None = None

    async def acquire(self) -> None:
        await self._turns.acquire()
        self._watch()

    def keep(self) -> None:
        """Keep the turn, since a piece of the body has arrived."""
        self._has_progressed = True

    def release(self) -> None:
        """Release the turn, unless it was lost."""
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

    If *max_tenant_requests* is less, there are several tenants: each holds at most that many places, and no more than
    TENANT_SHARE allows.
    """

    def __init__(self, max_requests: int, max_tenant_requests: int | None = None) -> None:
        self._max_requests = max_requests
        self._max_tenant_requests = max_requests if max_tenant_requests is None else max_tenant_requests
        self._idle = asyncio.Event()
        self._idle.set()
        self._turns = asyncio.Semaphore(TURNS)
        self._large_turns = asyncio.Semaphore(TURNS)
        self._huge_turns = asyncio.Semaphore(1)
        self._starts = asyncio.Semaphore(TURNS)
        self._readers = asyncio.Semaphore(TURNS)
        self._huge_readers = asyncio.Semaphore(TURNS)
        self._of_tenants: Counter[bytes] = Counter()
        self.num_requests = 0
        self.draining = False

    def check(self, tenant: bytes) -> None:
        """Raise Draining or QueueFull if admit() would, so that a request that cannot be served is not read."""
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
        """Delay the block until few others are in theirs, so that a burst of requests does not stall the loop.

        The block works on the event loop and must not wait: a wait would delay all other requests. Only a long body may
        be parsed by a thread meanwhile: it delays large ones alone, which have turns of their own.
        """
        is_huge, loop = num_body_bytes > HUGE_BODY_BYTES, asyncio.get_running_loop()
        turns = self._huge_turns if is_huge else self._large_turns if _is_large(num_body_bytes) else self._turns
        await turns.acquire()
        began = loop.time()
        try:
            yield
        finally:
            # Without a round of the loop in between, all waiting blocks would run in one round.
            loop.call_later(loop.time() - began if is_huge else 0, turns.release)

    async def start(self, num_body_bytes: int | None) -> None:
        """Wait until a request with a body of *num_body_bytes* may begin; large ones begin one after another."""
        if _is_large(num_body_bytes):
            async with self._starts:
                await asyncio.sleep(0)

    @contextlib.asynccontextmanager
    async def reading(self, num_body_bytes: int | None) -> AsyncIterator[ReadingTurn]:
        """Delay the block, which reads a body of *num_body_bytes*, None if the length is unknown.

        Small bodies do not wait. Large ones take turns; one that pauses loses its turn and is read without one.
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
        """Refuse new requests and wait for the others; return whether all ended in time."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._idle.wait()
        return not self.num_requests


class WorkThreads:
    """Runs long work in threads, and short work on the event loop in a turn of *admission*."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="prepare")
        # As many as have a turn, so none waits for another one here.
        self._parsers = ThreadPoolExecutor(TURNS + 1, thread_name_prefix="parse")

    async def run(self, is_long: bool, num_bytes: int, work: Callable[[], T]) -> T:
        """Run *work* in a thread if it *is_long*, else on the event loop in a turn. Return its result.

        *num_bytes*, the size of its input, decides whose turns it shares.
        """
        if is_long:
            return await asyncio.get_running_loop().run_in_executor(self._threads, copy_context().run, work)
        async with self._admission.turn(num_bytes):
            return work()

    @staticmethod
    def takes(body: bytes | bytearray) -> bool:
        """Return whether *body* is parsed in a thread."""
        return len(body) > LONG_BODY_BYTES

    async def parse(self, body: bytes | bytearray, parse: Callable[[bytes | bytearray], T]) -> T:
        """Return what *parse* makes of *body*: in a thread if that may take long, else on the event loop."""
        if not self.takes(body):
            return parse(body)
        parsing = asyncio.get_running_loop().run_in_executor(self._parsers, copy_context().run, parse, body)
        try:
            return await asyncio.shield(parsing)
        finally:
            # Until the thread has ended, its memory is in use, and the next long body waits.
            if not parsing.done():
                await asyncio.wait([parsing])
                parsing.exception()

    def close(self) -> None:
        """Cancel work that has not begun."""
        for threads in (self._threads, self._parsers):
            threads.shutdown(wait=False, cancel_futures=True)


def _is_large(num_body_bytes: int | None) -> bool:
    return num_body_bytes is None or num_body_bytes > LARGE_BODY_BYTES


NO_ROOM = "Other requests hold all memory for bodies and answers; try again shortly."

CLIENT_SHARE = 0.5
"""The share of the budget that one client may hold."""


@dataclass(frozen=True)
class _Waiter:
    """A reservation of *num_own* bytes that waits for *nbytes* more."""

    client: Hashable
    nbytes: int
    num_own: int
    granted: asyncio.Future[None]


class ByteBudget:
    """A budget of *capacity_bytes*; one client holds at most CLIENT_SHARE of it.

    A client's only request may take the whole capacity, but never more. A request waits *wait_seconds* for room.
    """

    def __init__(self, capacity_bytes: int, wait_seconds: float = 5.0) -> None:
        self.capacity_bytes = capacity_bytes
        self.num_bytes = 0
        self._wait_seconds = wait_seconds
        self._client_bytes: Counter[Hashable] = Counter()
        self._waiting: deque[_Waiter] = deque()

    def reservation(self, client: Hashable = None) -> "Reservation":
        """Return an empty reservation for a request of *client*."""
        return Reservation(self, client)

    async def reserve(self, client: Hashable, nbytes: int, num_own: int) -> None:
        """Wait for room, and take *nbytes* more for a request of *client* that has *num_own*.

        Raises QueueFull after the deadline, and BodyTooLarge if there can never be room.
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
                raise QueueFull(NO_ROOM) from error
            raise

    def claim(self, client: Hashable, nbytes: int) -> None:
        """Take *nbytes* of *client* for what exists already, such as an answer, so that it cannot wait for room.

        Raises QueueFull if there is no room, and BodyTooLarge if there can never be.
        """
        if nbytes > self.capacity_bytes:
            raise BodyTooLarge(f"This takes {nbytes} bytes of memory; all together get {self.capacity_bytes}.")
        num_own = self._client_bytes[client]
        if num_own and num_own + nbytes > self.capacity_bytes * CLIENT_SHARE:
            raise QueueFull("Your requests hold half of all memory; read their answers, then send this again.")
        if self.num_bytes + nbytes > self.capacity_bytes:
            raise QueueFull(NO_ROOM)
        self.take(client, nbytes)

    def is_over(self, client: Hashable) -> bool:
        """Whether *client*, or all clients together, hold more than they may."""
        return self.num_bytes > self.capacity_bytes or self._client_bytes[client] > self.capacity_bytes * CLIENT_SHARE

    def take(self, client: Hashable, nbytes: int) -> None:
        """Count *nbytes* of *client* at once, even if there is no room."""
        self.num_bytes += nbytes
        self._client_bytes[client] += nbytes

    def give_back(self, client: Hashable, nbytes: int) -> None:
        """Release *nbytes* of *client*; waiting requests get them in order of arrival."""
        self.num_bytes -= nbytes
        self._client_bytes[client] -= nbytes
        if self._client_bytes[client] <= 0:
            del self._client_bytes[client]
        self._grant()

    def _is_at_share(self, waiter: _Waiter) -> bool:
        client_bytes = self._client_bytes[waiter.client]
        return client_bytes > waiter.num_own and client_bytes + waiter.nbytes > self.capacity_bytes * CLIENT_SHARE

    def _grant(self) -> None:
        """Grant in order of arrival. A client at its share delays only its own requests."""
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
    """The bytes of one request. A context manager that releases all bytes at its end."""

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

    def claim(self, nbytes: int) -> None:
        """Reserve *nbytes* more without waiting. Raises QueueFull and BodyTooLarge."""
        self._budget.claim(self.client, nbytes)
        self.num_bytes += nbytes

    @property
    def is_over(self) -> bool:
        """Whether more bytes are taken than the budget allows, so that grow() would wait."""
        return self._budget.is_over(self.client)

    def take(self, nbytes: int) -> None:
        """Count *nbytes* more that are already in memory, such as those of a shared fetch."""
        self._budget.take(self.client, nbytes)
        self.num_bytes += nbytes

    def count(self, nbytes: int) -> None:
        """Count *nbytes* more that are already in memory, or fewer if negative."""
        if nbytes > 0:
            self.take(nbytes)
        else:
            self.keep(self.num_bytes + nbytes)

    def keep(self, nbytes: int) -> None:
        """Release all but *nbytes*."""
        surplus = self.num_bytes - nbytes
        if surplus > 0:
            self.num_bytes = nbytes
            self._budget.give_back(self.client, surplus)

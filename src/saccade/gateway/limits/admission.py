"""How many requests are being served, whether new ones are, and whose turn it is on the event loop."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from saccade.errors import Draining, QueueFull

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

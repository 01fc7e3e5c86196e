"""Decides when a request may begin, when its body may be read, and when it may do long work.

A counter limits the requests in flight. Requests take turns to read large bodies and to do long work.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator

from saccade.errors import Draining, QueueFull

TURNS = 2
"""Requests that may work in one round of the event loop; each takes about a millisecond."""

LARGE_BODY_BYTES = 64 << 10
"""Requests with longer bodies have separate turns, so that a request with text only does not wait for images."""

HUGE_BODY_BYTES = 2 << 20
"""Longer bodies also have separate turns. Reading one may take as long as a hundred images. The thread that parses it
holds the interpreter's lock meanwhile: after the work for one the loop serves others as long, before the next."""

READING_SECONDS = 0.005
"""How long a large body may pause and keep its reading turn; a slower one is read without a turn."""

TENANT_SHARE = 3
"""Each of several tenants may hold this many times the number of free places. So a single tenant gets three quarters of
the places, two get three sevenths each, and a later tenant finds a place unless there are very many."""


class ReadingTurn:
    """A turn for reading one large body. A client that pauses loses its turn."""

    def __init__(self, turns: asyncio.Semaphore) -> None:
        self._turns = turns
        self._has_progressed = False
        self._timer: asyncio.TimerHandle | None = None

    async def acquire(self) -> None:
        await self._turns.acquire()
        self._watch()

    def keep(self) -> None:
        """Note that a piece of the body has arrived, which keeps the turn."""
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
    """Counts requests in flight, and refuses new ones over *max_requests* or once drain() has been called.

    A *max_tenant_requests* below *max_requests* means that there are several tenants. Each holds at most that many
    places, and no more than TENANT_SHARE allows.
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
        """Delay the block while too many others run, so that a burst of requests does not stall the event loop.

        The block works on the event loop and must not wait, because a wait would delay all other requests. The only
        exception is a large body, which the block may have a thread parse: large bodies have turns of their own, so
        only they wait.
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
        """Wait until a request with a body of *num_body_bytes* may begin; large ones begin a few at a time."""
        if _is_large(num_body_bytes):
            async with self._starts:
                await asyncio.sleep(0)

    @contextlib.asynccontextmanager
    async def reading(self, num_body_bytes: int | None) -> AsyncIterator[ReadingTurn]:
        """Wait for a turn, then run the block, which reads a body. *num_body_bytes* is None if the length is unknown.

        Small bodies do not wait. Large ones take turns; one that pauses loses its turn and is then read without one.
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


def _is_large(num_body_bytes: int | None) -> bool:
    return num_body_bytes is None or num_body_bytes > LARGE_BODY_BYTES

"""How many requests are being served, whether new ones are, and whose turn it is on the event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

from saccade.errors import Draining, QueueFull

TURNS = 2
"""Requests that may work on the event loop between two of its rounds; each takes about a millisecond."""

LARGE_BODY_BYTES = 64 << 10
"""Requests with longer bodies have turns of their own, so that nobody who sends text waits for pictures."""

READING_SECONDS = 0.1
"""How long a large body may hold its turn to be read; a slower sender's goes on without."""

PIXELS_WAIT_SECONDS = 10.0
"""How long a request waits for others' pixels to go."""


class Admission:
    """Counts requests in flight; refuses new ones over *max_requests* and after drain().

    Pixels of all of them together, in shared memory and out of it, take at most *max_pixel_bytes*.
    """

    def __init__(self, max_requests: int, max_pixel_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_pixel_bytes = max_pixel_bytes
        self._room = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._turns = asyncio.Semaphore(TURNS)
        self._large_turns = asyncio.Semaphore(TURNS)
        self._starts = asyncio.Semaphore(TURNS)
        self._readers = asyncio.Semaphore(TURNS)
        self.num_requests = 0
        self.num_pixel_bytes = 0
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
    async def turn(self, num_body_bytes: int) -> AsyncIterator[None]:
        """Hold the block back until few others are in theirs, so that a burst of requests does not stall the loop."""
        async with self._large_turns if _is_large(num_body_bytes) else self._turns:
            yield
            # Without a round of the loop in between, all that wait would run in one.
            await asyncio.sleep(0)

    async def start(self, num_body_bytes: int | None) -> None:
        """Return when a request that announces so many bytes may begin: at once, or after a burst of large ones."""
        if _is_large(num_body_bytes):
            async with self._starts:
                await asyncio.sleep(0)

    @contextlib.asynccontextmanager
    async def reading(self, num_body_bytes: int | None) -> AsyncIterator[None]:
        """Hold the block back, which reads a body of so many bytes, None where nobody knows, while others read theirs.

        Small ones do not wait. Large ones take turns; one that arrives slowly passes its turn on and is read beside.
        """
        if not _is_large(num_body_bytes):
            yield
            return
        await self._readers.acquire()
        is_passed_on = False

        def pass_on() -> None:
            nonlocal is_passed_on
            if not is_passed_on:
                is_passed_on = True
                self._readers.release()

        timer = asyncio.get_running_loop().call_later(READING_SECONDS, pass_on)
        try:
            yield
        finally:
            timer.cancel()
            pass_on()

    @contextlib.asynccontextmanager
    async def pixels(self, nbytes: int, wait_seconds: float = PIXELS_WAIT_SECONDS) -> AsyncIterator[None]:
        """Hold room for *nbytes* of pixels; wait for it while others hold too much. A request over the whole budget
        goes when it is alone. Raises QueueFull after *wait_seconds*.
        """
        try:
            async with asyncio.timeout(wait_seconds):
                while nbytes and self.num_pixel_bytes and self.num_pixel_bytes + nbytes > self._max_pixel_bytes:
                    self._room.clear()
                    await self._room.wait()
        except TimeoutError as error:
            raise QueueFull("Too many pictures are being served already; try again shortly.") from error
        self.num_pixel_bytes += nbytes
        try:
            yield
        finally:
            self.num_pixel_bytes -= nbytes
            self._room.set()

    async def drain(self, timeout_seconds: float) -> bool:
        """Take no new requests and wait for the others; return whether all ended in time."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._idle.wait()
        return not self.num_requests


def _is_large(num_body_bytes: int | None) -> bool:
    return num_body_bytes is None or num_body_bytes > LARGE_BODY_BYTES

"""Threads for work that would hold up the event loop: long texts, large images and long bodies."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from saccade.gateway.admission import TURNS, Admission

LONG_BODY_BYTES = 128 << 10
"""Longer bodies are parsed in a thread: 128 KiB of tools without content take 14 milliseconds."""

THREADS = 2
"""Threads for long texts and large images."""

T = TypeVar("T")


class WorkThreads:
    """Runs long work in threads, and short work on the event loop in the turns that *admission* gives."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="prepare")
        # As many as can have a turn to be parsed. Before that, these threads count values, outside any turn.
        self._parsers = ThreadPoolExecutor(TURNS + 1, thread_name_prefix="parse")

    async def run_work(self, is_long: bool, num_bytes: int, work: Callable[[], T]) -> T:
        """Run *work* in a thread if it *is_long*, else on the event loop in a turn. Return its result.

        *num_bytes*, the input's size, decides which turns the work shares.
        """
        if is_long:
            return await asyncio.get_running_loop().run_in_executor(self._threads, copy_context().run, work)
        async with self._admission.turn(num_bytes):
            return work()

    @staticmethod
    def takes(body: bytes | bytearray) -> bool:
        """Return whether to parse *body* in a thread."""
        return len(body) > LONG_BODY_BYTES

    async def parse(self, body: bytes | bytearray, parse: Callable[[bytes | bytearray], T]) -> T:
        """Return the result of *parse* on *body*. It runs in a thread if *body* is long, else on the event loop."""
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

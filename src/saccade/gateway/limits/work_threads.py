"""Where the CPU work of a request runs: on the event loop in its turn, or in a thread where it takes long."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from saccade.gateway.limits.admission import Admission

THREADS = 2
"""Long texts and large images that are worked on at a time, beside the event loop."""

T = TypeVar("T")


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

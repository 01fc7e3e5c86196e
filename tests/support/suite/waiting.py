"""Wait in a test for what another thread, task or process does."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
SECONDS = 120
"""Long, so that a busy machine fails no test."""


def wait_until(check: Callable[[], T]) -> T:
    """Return what *check* returns as soon as that is true; fail after SECONDS."""
    deadline = time.monotonic() + SECONDS
    while not (found := check()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


async def until(check: Callable[[], object]) -> None:
    """Return as soon as *check* is true, while other tasks run; fail after SECONDS."""
    async with asyncio.timeout(SECONDS):
        while not check():  # noqa: ASYNC110
            await asyncio.sleep(0.01)

"""Wait in a test for what another thread or process does."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(check: Callable[[], T], seconds: float = 10) -> T:
    """Return what *check* returns as soon as that is true; fail after *seconds*."""
    deadline = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found

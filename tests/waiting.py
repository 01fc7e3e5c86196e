"""Wait in a test for what another thread or process does."""

import time
from collections.abc import Callable


def wait_until(check: Callable[[], object], seconds: float = 10) -> None:
    """Return when *check* returns something true; fail after *seconds*."""
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.01)

"""What a hostile peer sends much of, and what it costs."""

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def array(item: bytes, num_bytes: int) -> bytes:
    """An array of msgpack of as many *item*s as there is room for."""
    count = num_bytes // len(item)
    return b"\xdd" + count.to_bytes(4, "big") + item * count


@contextmanager
def counted_bytes() -> Iterator[Callable[[], int]]:
    """Yield what returns the most bytes that Python's objects have taken since, with the collector off."""
    gc.disable()
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        gc.enable()

"""Counts the items in msgpack's arrays and maps before any objects are created."""

from typing import Final

FIXARRAY, ARRAY16, ARRAY32 = 0x90, 0xDC, 0xDD
FIXMAP, MAP16, MAP32 = 0x80, 0xDE, 0xDF

_BYTES_OF_COUNT: Final = {ARRAY16: 2, MAP16: 2, ARRAY32: 4, MAP32: 4}


def num_items(data: bytes | memoryview, start: int = 0) -> int:
    """Return how many items the array or map at *start* declares, or 0 for anything else."""
    if start >= len(data):
        return 0
    first = data[start]
    if first & 0xE0 == FIXMAP:
        return first & 0x0F
    num_bytes = _BYTES_OF_COUNT.get(first, 0)
    return int.from_bytes(data[start + 1 : start + 1 + num_bytes], "big")


def is_short_array(data: bytes) -> bool:
    """Return whether *data* begins with an array of at most 15 items, so that the first item is at data[1]."""
    return data[:1] >= b"\x90" and data[:1] <= b"\x9f"

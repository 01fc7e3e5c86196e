"""Makes malloc return freed memory to the system."""

import ctypes

M_MMAP_THRESHOLD = -3

LARGE_BLOCK_BYTES = 8 << 20
"""Freed blocks of at least this size return to the system; smaller ones, as most images take, are kept for reuse."""


def give_back_large_blocks() -> None:
    """Make malloc return the memory of large request bodies to the system.

    By default, glibc raises its mmap threshold, up to 32 MiB, when a large block is freed, and keeps smaller blocks
    (mallopt(3)). With other C libraries this does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)

"""Makes malloc keep the memory of freed tensors for the next ones."""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3

KEPT_BYTES, LARGEST_BYTES = 256 << 20, 1 << 30
"""As much freed memory is kept, and tensors up to the second size use it."""


def keep_freed_memory() -> None:
    """Make malloc keep freed memory, instead of returning it to the system at once.

    By default, glibc requests each block of more than 32 MiB from the system, and returns it when it is freed
    (mallopt(3)). The system clears every page of it again, which takes a quarter of the time of an MLP over many
    tokens. With other C libraries this does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(M_MMAP_THRESHOLD, LARGEST_BYTES)

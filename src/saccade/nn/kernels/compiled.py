"""How kernels are compiled."""

from typing import Any

from numba import njit

MATH = ("reassoc", "contract", "nsz", "arcp")
"""Sums in any order, so that they vectorise; but NaN and infinity stay what they are."""

compiled = njit(nogil=True, fastmath=set(MATH), error_model="numpy")
"""For a kernel: it lets other threads have the interpreter."""


exact = njit(nogil=True, error_model="numpy")
"""The same, but every operation is rounded as it is written."""


def compiled_for(signature: Any) -> Any:
    """Return `compiled` for these types alone, at once."""
    return njit(signature, nogil=True, fastmath=set(MATH), error_model="numpy")


inlined = njit(inline="always", fastmath=set(MATH), error_model="numpy")
"""For what kernels share."""

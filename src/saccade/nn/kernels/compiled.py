"""How kernels are compiled."""

from numba import njit

MATH = ("reassoc", "contract", "nsz", "arcp")
"""Sums in any order, so that they vectorise; but NaN and infinity stay what they are."""

compiled = njit(nogil=True, fastmath=set(MATH), error_model="numpy")
"""For a kernel: it lets other threads have the interpreter."""

inlined = njit(inline="always", fastmath=set(MATH), error_model="numpy")
"""For what kernels share."""

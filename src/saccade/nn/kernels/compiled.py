"""How kernels are compiled."""

from numba import njit

MATH = ("reassoc", "contract", "nsz", "arcp")
"""Sums in any order, so that they vectorise; but NaN and infinity stay what they are."""

compiled = njit(fastmath=set(MATH), error_model="numpy")
"""For what kernels call."""

inlined = njit(inline="always", fastmath=set(MATH), error_model="numpy")
"""For what becomes part of each kernel that uses it."""

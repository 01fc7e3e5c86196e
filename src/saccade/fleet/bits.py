"""Converts sets of small numbers between the bits of an int and arrays."""

import numpy as np
from numpy.typing import NDArray


def numbers_of(bits: int) -> NDArray[np.intp]:
    """Return the numbers of the bits that are set in *bits*, ascending."""
    if bits & (bits - 1) == 0:
        return np.array([bits.bit_length() - 1] if bits else [], np.intp)
    return _unpacked(bits, bits.bit_length()).nonzero()[0]


def members_of(bits: int, numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return for each of *numbers* whether its bit is set in *bits*."""
    if not bits:
        return np.zeros(len(numbers), np.bool_)
    are_members: NDArray[np.bool_] = _unpacked(bits, int(numbers.max()) + 1)[numbers] != 0
    return are_members


def flags_of(bits: int, count: int) -> NDArray[np.bool_]:
    """Return for each number below *count* whether its bit is set in *bits*."""
    flags: NDArray[np.bool_] = _unpacked(bits, count)[:count] != 0
    return flags


def bits_of(numbers: NDArray[np.int64]) -> int:
    """Return an int with the bits *numbers* set."""
    if len(numbers) == 0:
        return 0
    flags = np.zeros(int(numbers.max()) + 1, np.uint8)
    flags[numbers] = 1
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")


def _unpacked(bits: int, num_bits: int) -> NDArray[np.uint8]:
    """Return at least the lowest *num_bits* bits of *bits*, each as an element."""
    num_bytes = max(num_bits, bits.bit_length()) + 7 >> 3
    return np.unpackbits(np.frombuffer(bits.to_bytes(num_bytes, "little"), np.uint8), bitorder="little")

"""OpenMP's threads, those that torch computes with, for kernels of ours.

They wait for one another spinning, for a moment, and need no interpreter: a kernel is shared out in microseconds, where
waking a thread of Python's takes hundreds. The entry points are what GCC makes of `#pragma omp parallel` (libgomp's
manual, "Implementing PARALLEL construct"); the runtimes of LLVM and Intel have them, too.
"""

import ctypes
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import cfunc, njit, types
from numba.extending import intrinsic

from saccade.nn.kernels.compiled import MATH

RUNTIME = re.compile(r"\S*/lib(?:gomp|iomp5|omp)\b\S*\.so\S*")


@cache
def _runtime() -> ctypes.CDLL | None:
    """Return the OpenMP that is loaded, torch's own first; None where there is none."""
    maps = Path("/proc/self/maps")
    loaded = sorted(set(RUNTIME.findall(maps.read_text()))) if maps.exists() else []
    folder = str(Path(torch.__file__).parent.parent)
    loaded.sort(key=lambda path: not path.startswith(folder))
    return ctypes.CDLL(loaded[0]) if loaded else None


@intrinsic
def pointer(_: Any, address: Any) -> Any:
    """An address as a pointer, for numba.carray."""

    def generate(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@cache
def sharing() -> Any:
    """Return a function for kernels: of *size* pieces of work, this thread has those from (begin, up to end)."""
    runtime = _runtime()
    if runtime is None:
        return njit(lambda size: (0, size))
    number, total = runtime.omp_get_thread_num, runtime.omp_get_num_threads
    for function in (number, total):
        function.argtypes, function.restype = [], ctypes.c_int

    def mine(size: Any) -> Any:
        part, count = number(), total()
        return size * part // count, size * (part + 1) // count

    return njit(mine)


class Kernel:
    """A function of ours that one thread runs alone, or several share.

    Each calls it with the address of the arguments, int64: a float as `float_bits`, an array by its address.
    """

    def __init__(self, function: Any, exact: bool = False) -> None:
        """Compile it, which takes a second. In an *exact* one every operation is rounded as it is written."""
        options = {} if exact else {"fastmath": set(MATH)}
        self._entry = cfunc(types.void(types.voidptr), error_model="numpy", **options)(function)
        self._alone = self._entry.ctypes
        self._address = ctypes.c_void_p(self._entry.address)
        self._runtime = _runtime()

    def __call__(self, arguments: Sequence[int], num_threads: int = 1) -> None:
        """Have up to *num_threads* threads call it, each once, and wait for them."""
        block = (ctypes.c_int64 * len(arguments))(*arguments)
        if self._runtime is None or num_threads <= 1:
            self._alone(block)
        else:
            self._runtime.GOMP_parallel(self._address, block, num_threads, 0)


def float_bits(value: float) -> int:
    """Return *value* as an argument: a kernel takes it out by words.first(np.uint64(argument))."""
    return int(np.float32(value).view(np.uint32))

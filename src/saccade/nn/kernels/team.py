"""OpenMP's threads, those that torch computes with, for kernels of ours.

They wait for one another spinning, for a moment, and need no interpreter: a kernel is shared out in microseconds, where
waking a thread of Python's takes hundreds. The entry points are what GCC makes of `#pragma omp parallel` (libgomp's
manual, "Implementing PARALLEL construct"); the runtimes of LLVM and Intel have them, too.
"""

import ctypes
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic

from saccade.nn.kernels.compiled import compiled

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
def _position() -> Any:
    """Return a function for kernels that tells (which of the threads this is, how many there are)."""
    runtime = _runtime()
    if runtime is None:
        return njit(lambda: (0, 1))
    number, total = runtime.omp_get_thread_num, runtime.omp_get_num_threads
    for function in (number, total):
        function.argtypes, function.restype = [], ctypes.c_int
    return njit(lambda: (number(), total()))


def member(num_arguments: int, kernel: Any) -> Any:
    """Return *kernel* compiled for `share`.

    Each thread calls it with (int64 [num_arguments], the thread's number, how many there are).
    """
    position, kernel = _position(), compiled(kernel)

    def run(data: Any) -> None:
        part, count = position()
        kernel(carray(data, num_arguments, np.int64), part, count)

    return cfunc(types.void(types.voidptr))(run)


@compiled
def section(size, part, count):
    """Return (begin, end) of part *part* of *count* of about the same size."""
    return size * part // count, size * (part + 1) // count


def share(kernel: Any, arguments: npt.NDArray[np.int64], num_threads: int) -> None:
    """Have up to *num_threads* threads call what member() made, each once, and wait for them."""
    runtime = _runtime()
    if runtime is None or num_threads <= 1:
        kernel.ctypes(arguments.ctypes.data)
    else:
        runtime.GOMP_parallel(
            ctypes.c_void_p(kernel.address), ctypes.c_void_p(arguments.ctypes.data), ctypes.c_uint(num_threads), 0
        )

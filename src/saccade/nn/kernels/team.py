"""OpenMP's threads, those that torch computes with, for kernels of ours.

They wait for one another spinning, for a moment, and need no interpreter: a kernel is shared out in microseconds, where
waking a thread of Python's takes hundreds. The entry points are what GCC makes of `#pragma omp parallel` (libgomp's
manual, "Implementing PARALLEL construct"); the runtimes of LLVM and Intel have them, too.
"""

import ctypes
import re
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec, cast

import numpy as np
import torch
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

from saccade.nn.kernels import tiles
from saccade.nn.kernels.compiled import compiled
from saccade.nn.kernels.machine_code import Body, MachineCode, machine_code

RUNTIME = re.compile(r"\S*/lib(?:gomp|iomp5|omp)\b\S*\.so\S*")
LINE_BYTES = 64
NUMBER, TOTAL = "saccade_thread_number", "saccade_num_threads"
"""Names by which kernels know the runtime's functions, whatever file they are in."""

P = ParamSpec("P")


@cache
def _runtime() -> ctypes.CDLL | None:
    """Return the OpenMP that is loaded, torch's own first; None where there is none."""
    maps = Path("/proc/self/maps")
    loaded = sorted(set(RUNTIME.findall(maps.read_text()))) if maps.exists() else []
    folder = str(Path(torch.__file__).parent.parent)
    loaded.sort(key=lambda path: not path.startswith(folder))
    return ctypes.CDLL(loaded[0]) if loaded else None


@cache
def _link_runtime() -> Sequence[Any]:
    """Let code that is linked from now on find NUMBER and TOTAL; return what must live as long as it."""
    runtime = _runtime()
    if runtime is None:
        one_thread = ctypes.CFUNCTYPE(ctypes.c_int)
        functions: list[Any] = [one_thread(lambda: 0), one_thread(lambda: 1)]
    else:
        functions = [runtime.omp_get_thread_num, runtime.omp_get_num_threads]
    for name, function in zip((NUMBER, TOTAL), functions, strict=True):
        binding.add_symbol(name, ctypes.cast(function, ctypes.c_void_p).value)
    return functions


@intrinsic
def pointer(_: Any, address: Any) -> Any:
    """An address as a pointer, for numba.carray."""

    def generate(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


_number = types.ExternalFunction(NUMBER, types.int32())
_total = types.ExternalFunction(TOTAL, types.int32())


@compiled
def own_share(size):
    """Of *size* pieces of work, this thread has those from (begin, up to end)."""
    part, count = _number(), _total()
    return size * part // count, size * (part + 1) // count


@compiled
def room(address, nbytes):
    """Where this thread's memory begins, of all at *address*, *nbytes* for each."""
    return address + _number() * nbytes


class _Room(threading.local):
    """Memory for a kernel to work in, of its own for whoever calls it. It grows, and is kept: new memory is cold."""

    def __init__(self) -> None:
        self._memory = tiles.empty(np.uint32, 0)
        self._start = 0

    def of(self, nbytes: int) -> int:
        """Return where *nbytes* begin, whole cache lines. Raises MemoryError."""
        if nbytes > self._memory.nbytes:
            self._memory = tiles.empty(np.uint32, nbytes // 4)
            self._start = self._memory.ctypes.data
        return self._start


class Kernel:
    """A function of ours that one thread runs alone, or several share.

    Each calls it with the address of the arguments, int64: a float as `float_bits`, an array by its address. It cannot
    ask for memory.
    """

    def __init__(self, code: MachineCode) -> None:
        self._code = code
        self._alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code.address)
        self._address = ctypes.c_void_p(code.address)
        self._runtime = _runtime()
        self._room = _Room()

    def __call__(self, arguments: Sequence[int], num_threads: int = 1, room_bytes: int = 0) -> None:
        """Have up to *num_threads* threads call it, each once, and wait for them.

        With *room_bytes*, each is lent so many of its own, with whatever is in them, that begin with a cache line: two
        more arguments say where, and how many, as `room` wants to know. Raises MemoryError where there are no more, and
        RuntimeError where the kernel raised anything.
        """
        num_threads = 1 if self._runtime is None else max(1, num_threads)
        if room_bytes:
            room_bytes += -room_bytes % LINE_BYTES
            arguments = (*arguments, self._room.of(num_threads * room_bytes), room_bytes)
        block = (ctypes.c_int64 * (1 + len(arguments)))(0, *arguments)
        if self._runtime is None or num_threads == 1:
            self._alone(block)
        else:
            self._runtime.GOMP_parallel(self._address, block, num_threads, 0)
        if block[0]:
            raise RuntimeError("A kernel failed.")


def kernel(*, exact: bool = False) -> Callable[[Callable[P, Body]], Callable[P, Kernel]]:
    """Turn a function that defines a kernel into one that returns it, compiled, once for each choice of parameters.

    The definition may depend on them, its file and this package alone. In an *exact* kernel every operation is rounded
    as it is written.
    """

    def decorate(define: Callable[P, Body]) -> Callable[P, Kernel]:
        @cache
        def made(*parameters: Any) -> Kernel:
            _link_runtime()
            return Kernel(machine_code(define, parameters, exact))

        return cast("Callable[P, Kernel]", made)

    return decorate


def float_bits(value: float) -> int:
    """Return *value* as an argument: a kernel takes it out by words.first(np.uint64(argument))."""
    return int(np.float32(value).view(np.uint32))

"""AMX: registers of 16 rows of 64 bytes, and products of them.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, 10.2.3 (MXCSR), and 2, TILELOADD,
TDPBF16PS; Linux, Documentation/arch/x86/xstate.rst. Tiles are named by literal numbers from 0 to 7; addresses and
strides are in bytes.
"""

import ctypes
import math
import platform
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from saccade.nn.kernels.vectors import at, call

ROWS, ROW_BYTES, NUM_TILES = 16, 64, 8
TILE_BYTES = ROWS * ROW_BYTES
NEEDED = ("amx-tile", "amx-bf16", "avx512f", "avx512dq")
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18
"""Linux lends a process these registers only when it asks."""

SMALL_IS_ZERO = 0x8040
"""Of the control and status register of vectors: results and operands."""

BYTE, WORD = ir.IntType(8), ir.IntType(32)


@cache
def available() -> bool:
    """Return whether kernels may use tiles from now on; asks the kernel for them."""
    features = binding.get_host_cpu_features()
    if platform.system() != "Linux" or not all(features.get(name) for name in NEEDED):
        return False
    return ctypes.CDLL(None, use_errno=True).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA) == 0


def configuration() -> npt.NDArray[np.uint8]:
    """Return what `configure` reads, for all tiles at their full size."""
    layout = np.zeros(64, np.uint8)
    layout[0] = 1
    layout[16 : 16 + 2 * NUM_TILES : 2] = ROW_BYTES
    layout[48 : 48 + NUM_TILES] = ROWS
    return layout


def empty(dtype: Any, *shape: int) -> npt.NDArray[Any]:
    """Return room for values of four bytes that begins with a cache line: what straddles two loads half as fast."""
    count = math.prod(shape)
    words = np.empty(count + ROW_BYTES // 4, dtype)
    begin = -words.__array_interface__["data"][0] % ROW_BYTES // 4
    return words[begin : begin + count].reshape(shape)


def _instruction(name: str, num_tiles: int, num_addresses: int) -> Callable[[tuple[Any, ...]], Any]:
    """Return the typing of an intrinsic that takes so many literal tiles, an address and strides behind it."""

    def typed(tiles: tuple[Any, ...]) -> Any:
        numbers = [ir.Constant(BYTE, tile.literal_value) for tile in tiles]

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            operands = list(arguments[num_tiles:])
            if operands:
                operands[0] = at(builder, operands[0], BYTE)
            call(builder, f"llvm.x86.{name}", ir.VoidType(), *numbers, *operands)
            return context.get_dummy_value()

        return types.void(*tiles, *[types.intp] * num_addresses), generate

    return typed


@intrinsic(prefer_literal=True)
def load(_: Any, tile: Any, address: Any, stride: Any) -> Any:
    """Fill *tile* with rows that lie *stride* apart."""
    return _instruction("tileloadd64", 1, 2)((tile,))


@intrinsic(prefer_literal=True)
def store(_: Any, tile: Any, address: Any, stride: Any) -> Any:
    """Write the rows of *tile*, *stride* apart."""
    return _instruction("tilestored64", 1, 2)((tile,))


@intrinsic(prefer_literal=True)
def zero(_: Any, tile: Any) -> Any:
    """Fill *tile* with zeros."""
    return _instruction("tilezero", 1, 0)((tile,))


@intrinsic(prefer_literal=True)
def dot(_: Any, total: Any, left: Any, right: Any) -> Any:
    """total [16, 16] float32 += left [16, 32] bfloat16 times right [32, 16], rows 2 i and 2 i + 1 interleaved."""
    return _instruction("tdpbf16ps", 3, 0)((total, left, right))


@intrinsic
def configure(_: Any, address: Any) -> Any:
    """Begin to use tiles as the `configuration` at *address* says; return what `release` takes.

    From now on what is too small for a normal float32 counts as zero, in vectors as it does in tiles: an exponential or
    a quotient that comes out so small takes a hundred times as long as another.
    """

    def generate(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        call(builder, "llvm.x86.ldtilecfg", ir.VoidType(), at(builder, arguments[0], BYTE))
        room = cgutils.alloca_once(builder, WORD)
        place = builder.bitcast(room, BYTE.as_pointer())
        call(builder, "llvm.x86.sse.stmxcsr", ir.VoidType(), place)
        before = builder.load(room)
        builder.store(builder.or_(before, WORD(SMALL_IS_ZERO)), room)
        call(builder, "llvm.x86.sse.ldmxcsr", ir.VoidType(), place)
        return before

    return types.uint32(types.intp), generate


@intrinsic
def release(_: Any, before: Any) -> Any:
    """Use them no more, and let small numbers be what they are."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        call(builder, "llvm.x86.tilerelease", ir.VoidType())
        room = cgutils.alloca_once(builder, WORD)
        builder.store(arguments[0], room)
        call(builder, "llvm.x86.sse.ldmxcsr", ir.VoidType(), builder.bitcast(room, BYTE.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.uint32), generate

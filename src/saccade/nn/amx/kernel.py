"""Attention in bfloat16 with AMX: softmax(Q K^T) V, one block of keys after another, with float32 scores and sums.

Formula: Dao 2023, arXiv:2307.08691, algorithm 1, with everything transposed: a row of scores is one key, a column one
query. So the softmax goes from row to row with sixteen queries in a register, and never mixes values within one.
Instructions: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, 10.2.3 (MXCSR), and 2, TILELOADD,
TDPBF16PS. Numba has no type for bfloat16: two neighbouring values are one uint32, the first in its lower half.

All of the kernel is in this file, because Numba's cache looks for changes only in the file of the cached function.

Shapes: N query tokens, L key tokens, W pairs of channels of a head, two tiles of C = 16 queries. Each row of
keys is padded to whole tiles; values are transposed, one row per channel. Addresses and strides are in bytes; tiles are
literals from 0 to 7.
"""

from collections.abc import Callable, Mapping
from functools import cache
from math import log
from types import MappingProxyType
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model
from numpy.polynomial import Chebyshev, Polynomial

LANES, ROW_BYTES, TILE_BYTES = 16, 64, 1024
"""Values in a vector register; bytes of one, which is a tile's row too; bytes of a tile of sixteen rows."""

QUERIES, KEYS, TILE_KEYS = 32, 128, 32
"""Queries of a block, two tiles; keys of a block, whose scores fit into the first-level cache; keys of two tiles."""

SCORES_BYTES, SHARES_BYTES = KEYS * ROW_BYTES, KEYS // 2 * ROW_BYTES
"""Bytes of the scores, and of the shares, of one tile of queries."""

ARGUMENTS = (
    "next_thread", "next_item", "q", "k", "v", "out", "q_stride", "k_stride", "v_stride", "num_queries", "length",
    "num_heads", "width", "scale", "num_parts", "workspace", "workspace_bytes",
)  # fmt: skip
"""Arguments of `attention`: int64, except *scale*, float64. Strides are between tokens, in pairs of channels."""

LOG2_E = np.float32(1 / log(2))
EXP2 = Chebyshev.interpolate(np.exp2, 4, [0, 1]).convert(kind=Polynomial).coef[::-1].astype(np.float32)
"""Coefficients of 2^x between 0 and 1, the highest power first: relative error under 4e-6, a 500th of bfloat16's."""

ZERO, ONE, HIDDEN = np.float32(0), np.float32(1), np.float32(-1e30)
LOW, HIGH = np.uint32(0xFFFF), np.uint32(0xFFFF0000)
SMALL_IS_ZERO = 0x8040
"""Bits of MXCSR: results and operands too small for a normal float32 become zero."""

BYTE, INT, LONG = ir.IntType(8), ir.IntType(32), ir.IntType(64)
FLOATS, BITS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(INT, LANES)

OPTIONS: Mapping[str, Any] = MappingProxyType(
    {"fastmath": {"reassoc", "contract", "nsz", "arcp"}, "error_model": "numpy"}
)
"""Sums may be reordered, so that LLVM vectorises them; NaN and infinity keep their meaning."""

compiled = njit(**OPTIONS)


class Vector(types.Type):  # type: ignore[misc]
    """Numba's type for sixteen float32 values in one register."""

    def __init__(self) -> None:
        super().__init__("Vector")


VECTOR = Vector()


@register_model(Vector)
class VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    """Represents a Vector as LLVM's own vector type."""

    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, FLOATS)


def _call(builder: Any, name: str, result: Any, *operands: Any) -> Any:
    """Call an intrinsic of LLVM; most are one instruction."""
    signature = ir.FunctionType(result, [operand.type for operand in operands])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), operands)


def _every(number: float, kind: Any = BITS) -> Any:
    """Return a constant with *number* in each lane."""
    return ir.Constant(kind, [number] * LANES)


def _instruction(result: Any, *operands: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make an intrinsic from a function that emits code for LLVM, given a builder and operands of these Numba types."""

    def decorate(emit: Callable[..., Any]) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value = emit(builder, *arguments)
            return context.get_dummy_value() if result is types.void else value

        # Numba reads the number of operands from the signature of what it decorates.
        typed = {
            1: lambda context, a: (result(*operands), generate),
            2: lambda context, a, b: (result(*operands), generate),
            3: lambda context, a, b, c: (result(*operands), generate),
        }[len(operands)]
        typed.__name__ = emit.__name__
        return intrinsic(typed)

    return decorate


@_instruction(types.voidptr, types.int64)
def pointer(builder: Any, address: Any) -> Any:
    """Return an address as a pointer, for numba.carray."""
    return builder.inttoptr(address, BYTE.as_pointer())


@_instruction(types.int64, types.int64)
def take(builder: Any, address: Any) -> Any:
    """Return the int64 at *address* and increment it atomically: each thread gets a different number."""
    return builder.atomic_rmw("add", builder.inttoptr(address, LONG.as_pointer()), ir.Constant(LONG, 1), "monotonic")


@_instruction(VECTOR, types.int64)
def load(builder: Any, address: Any) -> Any:
    """Return the vector at *address*."""
    return builder.load(builder.inttoptr(address, FLOATS.as_pointer()), align=4)


@_instruction(types.void, types.int64, VECTOR)
def store(builder: Any, address: Any, vector: Any) -> None:
    """Write a vector to *address*."""
    builder.store(vector, builder.inttoptr(address, FLOATS.as_pointer()), align=4)


def _store_pairs(builder: Any, address: Any, lower: Any, upper: Any) -> None:
    """Write the upper half of each lane of *lower* and *upper* as pairs."""
    pairs = builder.or_(builder.lshr(lower, _every(16)), builder.and_(upper, _every(0xFFFF0000)))
    builder.store(pairs, builder.inttoptr(address, BITS.as_pointer()), align=4)


@_instruction(types.void, types.int64, VECTOR, VECTOR)
def store_shares(builder: Any, address: Any, lower: Any, upper: Any) -> None:
    """Write vectors of numbers from 0 to 1 as sixteen pairs of bfloat16, rounded to the nearest, ties up."""
    _store_pairs(builder, address, *(builder.add(builder.bitcast(x, BITS), _every(0x8000)) for x in (lower, upper)))


@_instruction(types.void, types.int64, VECTOR, VECTOR)
def store_pairs(builder: Any, address: Any, lower: Any, upper: Any) -> None:
    """Write vectors as sixteen pairs of bfloat16, rounded to the nearest, ties to even."""

    def rounded(value: Any) -> Any:
        bits = builder.bitcast(value, BITS)
        odd = builder.and_(builder.lshr(bits, _every(16)), _every(1))
        # Rounding could turn the bits of a NaN into those of a number.
        is_nan = builder.fcmp_unordered("uno", value, value)
        return builder.select(is_nan, _every(0x7FC00000), builder.add(bits, builder.add(odd, _every(0x7FFF))))

    _store_pairs(builder, address, rounded(lower), rounded(upper))


@_instruction(VECTOR, types.float32)
def spread(builder: Any, value: Any) -> Any:
    """Return a vector with *value* in every lane."""
    nothing = ir.Constant(FLOATS, ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(nothing, value, ir.Constant(INT, 0)), nothing, _every(0))


def _lane_by_lane(operation: str) -> Any:
    return _instruction(VECTOR, VECTOR, VECTOR)(lambda builder, left, right: getattr(builder, operation)(left, right))


add, subtract = _lane_by_lane("fadd"), _lane_by_lane("fsub")
multiply, divide = _lane_by_lane("fmul"), _lane_by_lane("fdiv")


@_instruction(VECTOR, VECTOR, VECTOR)
def largest(builder: Any, left: Any, right: Any) -> Any:
    """Return the larger value of each lane; *right* if one of them is NaN."""
    return builder.select(builder.fcmp_ordered(">", left, right), left, right)


@_instruction(VECTOR, VECTOR, VECTOR, VECTOR)
def multiply_add(builder: Any, left: Any, right: Any, addend: Any) -> Any:
    """Return left * right + addend, rounded once."""
    return _call(builder, "llvm.fma.v16f32", FLOATS, left, right, addend)


def _masked(builder: Any, name: str, *operands: Any) -> Any:
    """Call an AVX-512 instruction for all lanes, with the rounding mode of the thread."""
    every_lane, rounding = ir.Constant(ir.IntType(16), 0xFFFF), ir.Constant(INT, 4)
    name = f"llvm.x86.avx512.mask.{name}.ps.512"
    return _call(builder, name, FLOATS, *operands, _every(0.0, FLOATS), every_lane, rounding)


@_instruction(VECTOR, VECTOR)
def above_floor(builder: Any, x: Any) -> Any:
    """Return x - floor(x)."""
    return _masked(builder, "reduce", x, ir.Constant(INT, 1))


@_instruction(VECTOR, VECTOR, VECTOR)
def scale_by_power(builder: Any, factor: Any, x: Any) -> Any:
    """Return factor * 2^floor(x), or 0 if that is too small."""
    return _masked(builder, "scalef", factor, x)


def _tile_instruction(name: str, tiles: tuple[Any, ...], num_addresses: int) -> Any:
    """Return an intrinsic's signature and generator; it takes literal *tiles*, and an address and stride or none."""
    numbers = [ir.Constant(BYTE, tile.literal_value) for tile in tiles]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        operands = list(arguments[len(tiles) :])
        if operands:
            operands[0] = builder.inttoptr(operands[0], BYTE.as_pointer())
        _call(builder, f"llvm.x86.{name}", ir.VoidType(), *numbers, *operands)
        return context.get_dummy_value()

    return types.void(*tiles, *[types.int64] * num_addresses), generate


@intrinsic(prefer_literal=True)
def tile_load(_: Any, tile: Any, address: Any, stride: Any) -> Any:
    """Load *tile* from rows that are *stride* bytes apart."""
    return _tile_instruction("tileloadd64", (tile,), 2)


@intrinsic(prefer_literal=True)
def tile_store(_: Any, tile: Any, address: Any, stride: Any) -> Any:
    """Write the rows of *tile*, *stride* bytes apart."""
    return _tile_instruction("tilestored64", (tile,), 2)


@intrinsic(prefer_literal=True)
def tile_zero(_: Any, tile: Any) -> Any:
    """Fill *tile* with zeros."""
    return _tile_instruction("tilezero", (tile,), 0)


@intrinsic(prefer_literal=True)
def tile_dot(_: Any, total: Any, left: Any, right: Any) -> Any:
    """Add left [16, 32] times right [32, 16], bfloat16, to total, float32. Rows 2 i and 2 i + 1 of right interleave."""
    return _tile_instruction("tdpbf16ps", (total, left, right), 0)


def _change_status(builder: Any, change: Callable[[Any], Any]) -> Any:
    """Apply *change* to the vectors' control and status register (MXCSR); return the old value."""
    place = cgutils.alloca_once(builder, INT)
    address = builder.bitcast(place, BYTE.as_pointer())
    _call(builder, "llvm.x86.sse.stmxcsr", ir.VoidType(), address)
    before = builder.load(place)
    builder.store(change(before), place)
    _call(builder, "llvm.x86.sse.ldmxcsr", ir.VoidType(), address)
    return before


@_instruction(types.uint32, types.int64)
def configure(builder: Any, address: Any) -> Any:
    """Configure the tiles by the 64 bytes at *address*; return the argument of `release`.

    Exponentials that are too small for a normal float32 become zero; otherwise they would take a hundred times as long.
    """
    _call(builder, "llvm.x86.ldtilecfg", ir.VoidType(), builder.inttoptr(address, BYTE.as_pointer()))
    return _change_status(builder, lambda status: builder.or_(status, ir.Constant(INT, SMALL_IS_ZERO)))


@_instruction(types.void, types.uint32)
def release(builder: Any, before: Any) -> None:
    """Release the tiles, and restore the status register."""
    _call(builder, "llvm.x86.tilerelease", ir.VoidType())
    _change_status(builder, lambda _: before)


@compiled
def _exp2_coefficients():
    return spread(EXP2[0]), spread(EXP2[1]), spread(EXP2[2]), spread(EXP2[3]), spread(EXP2[4])


@compiled
def _exp2(x, coefficients):
    """Return 2^x, or 0 if that is too small."""
    a, b, c, d, e = coefficients
    rest = above_floor(x)
    power = multiply_add(multiply_add(multiply_add(multiply_add(a, rest, b), rest, c), rest, d), rest, e)
    return scale_by_power(power, x)


@compiled
def _lay_out_keys(k_LW, width, head, keys_LW):
    for t in range(k_LW.shape[0]):
        for w in range(width):
            keys_LW[t, w] = k_LW[t, head * width + w]


@compiled
def _lay_out_values(v_LW, width, head, values_DL):
    length = v_LW.shape[0]
    for i in range((length + 1) // 2):
        for w in range(width):
            a = v_LW[2 * i, head * width + w]
            b = v_LW[2 * i + 1, head * width + w] if 2 * i + 1 < length else np.uint32(0)
            values_DL[2 * w, i] = (a & LOW) | (b << np.uint32(16))
            values_DL[2 * w + 1, i] = (a >> np.uint32(16)) | (b & HIGH)


@compiled
def _lay_out_queries(q_NW, width, head, begin, queries_S2WC):
    for n in range(begin, min(begin + QUERIES, q_NW.shape[0])):
        tile, lane = (n - begin) // LANES, (n - begin) % LANES
        for w in range(width):
            queries_S2WC[w // LANES, tile, w % LANES, lane] = q_NW[n, head * width + w]


@compiled
def _multiply(left, left_stride, right, right_step):
    """Add two tiles of rows times two tiles of queries to tiles 0 to 3."""
    tile_load(4, right, ROW_BYTES)
    tile_load(5, right + right_step, ROW_BYTES)
    tile_load(6, left, left_stride)
    tile_load(7, left + LANES * left_stride, left_stride)
    tile_dot(0, 6, 4)
    tile_dot(1, 6, 5)
    tile_dot(2, 7, 4)
    tile_dot(3, 7, 5)


@compiled
def _store(out, query_step, row_step):
    tile_store(0, out, ROW_BYTES)
    tile_store(1, out + query_step, ROW_BYTES)
    tile_store(2, out + row_step, ROW_BYTES)
    tile_store(3, out + query_step + row_step, ROW_BYTES)


@compiled
def _score(keys, stride, queries, num_keys, num_left, scores):
    """Score two tiles of keys against two of queries at a time; hide keys from *num_left* on, which do not exist."""
    for t in range(0, num_keys, TILE_KEYS):
        tile_zero(0)
        tile_zero(1)
        tile_zero(2)
        tile_zero(3)
        for offset in range(0, stride, ROW_BYTES):
            _multiply(keys + t * stride + offset, stride, queries + 2 * LANES * offset, TILE_BYTES)
        _store(scores + t * ROW_BYTES, SCORES_BYTES, TILE_BYTES)
    for t in range(num_left, num_keys):
        store(scores + t * ROW_BYTES, spread(HIDDEN))
        store(scores + SCORES_BYTES + t * ROW_BYTES, spread(HIDDEN))


@compiled
def _softmax(scores, shares, num_keys, scale, coefficients, sums, mixed, num_tiles):
    """Turn scores into shares of a sum that is not complete yet, and rescale earlier results to the new maximum."""
    a = b = c = d = load(scores)
    for t in range(0, num_keys, 4):
        row = scores + t * ROW_BYTES
        a, b = largest(a, load(row)), largest(b, load(row + ROW_BYTES))
        c, d = largest(c, load(row + 2 * ROW_BYTES)), largest(d, load(row + 3 * ROW_BYTES))
    before = load(sums)
    after = largest(multiply(largest(largest(a, b), largest(c, d)), scale), before)
    store(sums, after)
    correction = _exp2(subtract(before, after), coefficients)
    for row in range(num_tiles * LANES):
        address = mixed + row // LANES * 2 * TILE_BYTES + row % LANES * ROW_BYTES
        store(address, multiply(load(address), correction))
    less, even, odd = subtract(spread(ZERO), after), multiply(load(sums + ROW_BYTES), correction), spread(ZERO)
    for t in range(0, num_keys, 2):
        row = scores + t * ROW_BYTES
        x = _exp2(multiply_add(load(row), scale, less), coefficients)
        y = _exp2(multiply_add(load(row + ROW_BYTES), scale, less), coefficients)
        even, odd = add(even, x), add(odd, y)
        store_shares(shares + t // 2 * ROW_BYTES, x, y)
    store(sums + ROW_BYTES, add(even, odd))


@compiled
def _mix(values, stride, shares, num_keys, mixed, num_tiles):
    """Add values, weighted by shares, to *mixed*: two tiles of channels by two of queries at a time."""
    for tile in range(0, num_tiles, 2):
        out = mixed + 2 * tile * TILE_BYTES
        tile_load(0, out, ROW_BYTES)
        tile_load(1, out + TILE_BYTES, ROW_BYTES)
        tile_load(2, out + 2 * TILE_BYTES, ROW_BYTES)
        tile_load(3, out + 3 * TILE_BYTES, ROW_BYTES)
        for t in range(0, num_keys, TILE_KEYS):
            _multiply(values + tile * LANES * stride + 2 * t, stride, shares + t // 2 * ROW_BYTES, SHARES_BYTES)
        _store(out, TILE_BYTES, 2 * TILE_BYTES)


@compiled
def _write(mixed, sums, pairs_2WC, head, begin, out_NW):
    width = pairs_2WC.shape[1]
    for tile in range(2):
        share = divide(spread(ONE), load(sums + (2 * tile + 1) * ROW_BYTES))
        for w in range(width):
            row = mixed + (2 * (2 * w // LANES) + tile) * TILE_BYTES + 2 * w % LANES * ROW_BYTES
            a, b = multiply(load(row), share), multiply(load(row + ROW_BYTES), share)
            store_pairs(pairs_2WC.ctypes.data + (tile * width + w) * ROW_BYTES, a, b)
    for n in range(begin, min(begin + QUERIES, out_NW.shape[0])):
        tile, lane = (n - begin) // LANES, (n - begin) % LANES
        for w in range(width):
            out_NW[n, head * width + w] = pairs_2WC[tile, w, lane]


@compiled
def _places(length, width):
    """Return the offsets in a thread's workspace, and its size.

    Keys come first. The offsets are those of values, queries, mixed values, scores, shares, sums, pairs and
    configuration.
    """
    num_keys, num_steps = (length + TILE_KEYS - 1) // TILE_KEYS * TILE_KEYS, (width + LANES - 1) // LANES
    values = num_keys * num_steps * ROW_BYTES
    queries = values + num_keys * num_steps * ROW_BYTES
    mixed = queries + num_steps * 2 * TILE_BYTES
    scores = mixed + num_steps * 4 * TILE_BYTES
    shares = scores + 2 * SCORES_BYTES
    sums = shares + 2 * SHARES_BYTES
    pairs = sums + 4 * ROW_BYTES
    configuration = pairs + 2 * width * ROW_BYTES
    return values, queries, mixed, scores, shares, sums, pairs, configuration, configuration + ROW_BYTES


def workspace_bytes(length: int, width: int) -> int:
    """Return the size of each thread's workspace in bytes."""
    return int(_places.py_func(length, width)[-1])


def _attention(data):
    """Compute attention. Each thread that calls this takes heads, or parts of a head's queries, one after another."""
    (
        _, _, q, k, v, out, q_stride, k_stride, v_stride, num_queries, length, num_heads, width, _, num_parts,
        start, num_bytes,
    ) = carray(data, 17, np.int64)  # fmt: skip
    counters = carray(data, 17, np.int64).ctypes.data
    scale = np.float32(carray(data, 17, np.float64)[13])
    start += take(counters) * num_bytes
    item = take(counters + 8)
    if item >= num_heads * num_parts:
        return
    q_NW = carray(pointer(q), (num_queries, q_stride), np.uint32)
    k_LW = carray(pointer(k), (length, k_stride), np.uint32)
    v_LW = carray(pointer(v), (length, v_stride), np.uint32)
    out_NW = carray(pointer(out), (num_queries, num_heads * width), np.uint32)
    at_values, at_queries, at_mixed, at_scores, at_shares, at_sums, at_pairs, at_configuration, _ = _places(
        length, width
    )
    # Tiles reach beyond a head's width and beyond the last key; no value there may be NaN.
    for place in range(start, start + num_bytes, ROW_BYTES):
        store(place, spread(ZERO))
    num_steps = (width + LANES - 1) // LANES
    num_tiles, key_stride = 2 * num_steps, num_steps * ROW_BYTES
    num_keys = at_values // key_stride
    keys = carray(pointer(start), (num_keys, num_steps * LANES), np.uint32)
    values = carray(pointer(start + at_values), (num_tiles * LANES, num_keys // 2), np.uint32)
    queries = carray(pointer(start + at_queries), (num_steps, 2, LANES, LANES), np.uint32)
    pairs = carray(pointer(start + at_pairs), (2, width, LANES), np.uint32)
    mixed, scores, shares, sums = start + at_mixed, start + at_scores, start + at_shares, start + at_sums
    configuration = carray(pointer(start + at_configuration), 64, np.uint8)
    configuration[0] = 1
    configuration[16:32:2] = ROW_BYTES
    configuration[48:56] = LANES
    scales, coefficients = spread(scale * LOG2_E), _exp2_coefficients()
    before = configure(configuration.ctypes.data)
    num_blocks, laid_out = (num_queries + QUERIES - 1) // QUERIES, -1
    while item < num_heads * num_parts:
        head, part = item // num_parts, item % num_parts
        if head != laid_out:
            laid_out = head
            _lay_out_keys(k_LW, width, head, keys)
            _lay_out_values(v_LW, width, head, values)
        for block in range(num_blocks * part // num_parts, num_blocks * (part + 1) // num_parts):
            begin = block * QUERIES
            _lay_out_queries(q_NW, width, head, begin, queries)
            for place in range(mixed, scores, ROW_BYTES):
                store(place, spread(ZERO))
            for place in range(sums, sums + 4 * ROW_BYTES, 2 * ROW_BYTES):
                store(place, spread(HIDDEN))
                store(place + ROW_BYTES, spread(ZERO))
            for first in range(0, length, KEYS):
                num_here = min(KEYS, num_keys - first)
                _score(start + first * key_stride, key_stride, start + at_queries, num_here, length - first, scores)
                for tile in range(2):
                    _softmax(
                        scores + tile * SCORES_BYTES, shares + tile * SHARES_BYTES, num_here,
                        scales, coefficients, sums + 2 * tile * ROW_BYTES, mixed + tile * TILE_BYTES, num_tiles,
                    )  # fmt: skip
                _mix(start + at_values + 2 * first, 2 * num_keys, shares, num_here, mixed, num_tiles)
            _write(mixed, sums, pairs, head, begin, out_NW)
        item = take(counters + 8)
    release(before)


@cache
def attention() -> Any:
    """Return the C function void (int64_t *), which takes ARGUMENTS and has an `address`. Numba caches the code."""
    try:
        return cfunc(types.void(types.voidptr), cache=True, **OPTIONS)(_attention)
    except RuntimeError:  # Numba finds no folder that it can write to.
        return cfunc(types.void(types.voidptr), **OPTIONS)(_attention)

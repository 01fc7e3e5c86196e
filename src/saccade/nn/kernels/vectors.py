"""Sixteen float32 in one register, as AVX-512 has them: for loops that LLVM would cut into eight or not vectorise.

Addresses are those of arrays (`array.ctypes.data`), in bytes.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16
VECTOR_BYTES = 4 * LANES
FLOATS, BITS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.IntType(32), LANES)
ALL_LANES, ROUNDING = ir.Constant(ir.IntType(16), 0xFFFF), ir.Constant(ir.IntType(32), 4)
"""Operands of AVX-512's masked instructions: change every lane, and round as the thread does."""

FLOOR = ir.Constant(ir.IntType(32), 1)
HALF, NAN = 0x8000, 0x7FC00000
UPPER = 0xFFFF0000


class Vector(types.Type):  # type: ignore[misc]
    """Numba's type of such a register."""

    def __init__(self) -> None:
        super().__init__("Vector")


VECTOR = Vector()


@register_model(Vector)
class VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    """It is LLVM's own vector."""

    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, FLOATS)


def call(builder: Any, name: str, result: Any, *operands: Any) -> Any:
    """Call one of LLVM's own functions, most of which are one instruction."""
    signature = ir.FunctionType(result, [operand.type for operand in operands])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), operands)


def at(builder: Any, address: Any, kind: Any) -> Any:
    """Turn an address into a pointer to *kind*."""
    return builder.inttoptr(address, kind.as_pointer())


def every(number: float, kind: Any = BITS) -> Any:
    """A constant with the same number in every lane."""
    return ir.Constant(kind, [number] * LANES)


@intrinsic
def load(_: Any, address: Any) -> Any:
    """The vector at *address*."""

    def generate(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(at(builder, arguments[0], FLOATS), align=4)

    return VECTOR(types.intp), generate


@intrinsic
def store(_: Any, address: Any, vector: Any) -> Any:
    """Write a vector to *address*."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], at(builder, arguments[0], FLOATS), align=4)
        return context.get_dummy_value()

    return types.void(types.intp, VECTOR), generate


@intrinsic
def store_shares(_: Any, address: Any, lower: Any, upper: Any) -> Any:
    """Write sixteen words of two bfloat16, rounded to the nearest, ties up: of vectors of numbers from 0 to 1."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, *values = arguments
        _store_words(builder, address, *(builder.add(builder.bitcast(value, BITS), every(HALF)) for value in values))
        return context.get_dummy_value()

    return types.void(types.intp, VECTOR, VECTOR), generate


@intrinsic
def store_pairs(_: Any, address: Any, lower: Any, upper: Any) -> Any:
    """Write sixteen words of two bfloat16, rounded to the nearest, ties to even."""

    def rounded(builder: Any, value: Any) -> Any:
        bits = builder.bitcast(value, BITS)
        odd = builder.and_(builder.lshr(bits, every(16)), every(1))
        nearest = builder.add(bits, builder.add(odd, every(HALF - 1)))
        # The sum may carry a NaN's bits over into a number's.
        return builder.select(builder.fcmp_unordered("uno", value, value), every(NAN), nearest)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, *values = arguments
        _store_words(builder, address, *(rounded(builder, value) for value in values))
        return context.get_dummy_value()

    return types.void(types.intp, VECTOR, VECTOR), generate


def _store_words(builder: Any, address: Any, lower: Any, upper: Any) -> None:
    words = builder.or_(builder.lshr(lower, every(16)), builder.and_(upper, every(UPPER)))
    builder.store(words, at(builder, address, BITS), align=4)


@intrinsic
def load_lower(_: Any, address: Any) -> Any:
    """The lower values of sixteen words of two bfloat16."""

    def generate(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        words = builder.load(at(builder, arguments[0], BITS), align=4)
        return builder.bitcast(builder.shl(words, every(16)), FLOATS)

    return VECTOR(types.intp), generate


@intrinsic
def load_upper(_: Any, address: Any) -> Any:
    """The upper values of sixteen words of two bfloat16."""

    def generate(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        words = builder.load(at(builder, arguments[0], BITS), align=4)
        return builder.bitcast(builder.and_(words, every(UPPER)), FLOATS)

    return VECTOR(types.intp), generate


@intrinsic
def spread(_: Any, value: Any) -> Any:
    """A float32 in every lane."""

    def generate(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        nothing = ir.Constant(FLOATS, ir.Undefined)
        one = builder.insert_element(nothing, arguments[0], ir.Constant(ir.IntType(32), 0))
        return builder.shuffle_vector(one, nothing, every(0))

    return VECTOR(types.float32), generate


def _lane_by_lane(operation: str) -> Any:
    @intrinsic
    def apply(_: Any, left: Any, right: Any) -> Any:
        def generate(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return getattr(builder, operation)(*arguments)

        return VECTOR(VECTOR, VECTOR), generate

    return apply


add, subtract = _lane_by_lane("fadd"), _lane_by_lane("fsub")
multiply, divide = _lane_by_lane("fmul"), _lane_by_lane("fdiv")


@intrinsic
def largest(_: Any, left: Any, right: Any) -> Any:
    """The larger value of each lane; *right* where one of them is NaN."""

    def generate(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *arguments), *arguments)

    return VECTOR(VECTOR, VECTOR), generate


@intrinsic
def magnitude(_: Any, x: Any) -> Any:
    """Without the sign."""

    def generate(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.and_(builder.bitcast(arguments[0], BITS), every(0x7FFFFFFF)), FLOATS)

    return VECTOR(VECTOR), generate


@intrinsic
def multiply_add(_: Any, left: Any, right: Any, addend: Any) -> Any:
    """left * right + addend, rounded once."""

    def generate(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return call(builder, "llvm.fma.v16f32", FLOATS, *arguments)

    return VECTOR(VECTOR, VECTOR, VECTOR), generate


@intrinsic
def above_floor(_: Any, x: Any) -> Any:
    """X - floor(x)."""

    def generate(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        name = "llvm.x86.avx512.mask.reduce.ps.512"
        return call(builder, name, FLOATS, arguments[0], FLOOR, every(0.0, FLOATS), ALL_LANES, ROUNDING)

    return VECTOR(VECTOR), generate


@intrinsic
def scale_by_power(_: Any, factor: Any, x: Any) -> Any:
    """Factor * 2^floor(x), 0 where that is too small."""

    def generate(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        name = "llvm.x86.avx512.mask.scalef.ps.512"
        return call(builder, name, FLOATS, *arguments, every(0.0, FLOATS), ALL_LANES, ROUNDING)

    return VECTOR(VECTOR, VECTOR), generate

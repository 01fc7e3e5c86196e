"""Two neighbouring values of a tensor as one machine word, so that one kernel serves bfloat16 and float32.

A word is uint32 for two bfloat16 and uint64 for two float32, the first value in its lower half. bfloat16 is the upper
half of a float32, so a word is taken apart by a shift and a mask, which compile to vector instructions.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

WORDS: Mapping[torch.dtype, Any] = MappingProxyType({torch.bfloat16: np.uint32, torch.float32: np.uint64})
"""The type of a tensor's words, by its dtype; there are kernels for no others."""

FLOAT, BITS, WIDE = ir.FloatType(), ir.IntType(32), ir.IntType(64)
UPPER = 0xFFFF0000


def words(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return a contiguous CPU tensor [..., 2 W] of bfloat16 or float32 as words [..., W], without a copy."""
    return tensor.view(torch.uint8).numpy().view(WORDS[tensor.dtype])


@intrinsic
def first(_: Any, word: Any) -> Any:
    """The lower value of a word, as float32."""

    def generate(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (bits,) = arguments
        halves = signature.args[0] == types.uint32
        return builder.bitcast(builder.shl(bits, BITS(16)) if halves else builder.trunc(bits, BITS), FLOAT)

    return types.float32(word), generate


@intrinsic
def second(_: Any, word: Any) -> Any:
    """The upper value of a word, as float32."""

    def generate(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (bits,) = arguments
        if signature.args[0] == types.uint32:
            return builder.bitcast(builder.and_(bits, BITS(UPPER)), FLOAT)
        return builder.bitcast(builder.trunc(builder.lshr(bits, WIDE(32)), BITS), FLOAT)

    return types.float32(word), generate


@intrinsic
def pack(_: Any, like: Any, lower: Any, upper: Any) -> Any:
    """Two float32 as a word of the type of *like*. To bfloat16 they are rounded to the nearest, ties to even."""

    def rounded(builder: Any, value: Any) -> Any:
        bits = builder.bitcast(value, BITS)
        odd = builder.and_(builder.lshr(bits, BITS(16)), BITS(1))
        nearest = builder.add(bits, builder.add(odd, BITS(0x7FFF)))
        # The sum may carry a NaN's bits over into a number's.
        return builder.select(builder.fcmp_unordered("uno", value, value), BITS(0x7FC00000), nearest)

    def generate(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, lower, upper = arguments
        if signature.args[0] == types.uint32:
            low = builder.lshr(rounded(builder, lower), BITS(16))
            return builder.or_(builder.and_(rounded(builder, upper), BITS(UPPER)), low)
        low, high = (builder.zext(builder.bitcast(value, BITS), WIDE) for value in (lower, upper))
        return builder.or_(builder.shl(high, WIDE(32)), low)

    return like(like, types.float32, types.float32), generate


@intrinsic
def power_of_two(_: Any, exponent: Any) -> Any:
    """2^exponent as float32, by its bits; int32 exponents from -126 to 127."""

    def generate(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.shl(builder.add(arguments[0], BITS(127)), BITS(23)), FLOAT)

    return types.float32(types.int32), generate

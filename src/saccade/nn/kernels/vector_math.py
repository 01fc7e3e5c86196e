"""Functions of vectors, for what is rounded to bfloat16 afterwards."""

from math import log, pi, sqrt

import numpy as np
from numpy.polynomial import Chebyshev, Polynomial

from saccade.nn.kernels.compiled import compiled
from saccade.nn.kernels.vectors import (
    above_floor,
    add,
    divide,
    magnitude,
    multiply,
    multiply_add,
    scale_by_power,
    spread,
    subtract,
)

LOG2_E = np.float32(1 / log(2))
EXP2 = Chebyshev.interpolate(np.exp2, 4, [0, 1]).convert(kind=Polynomial).coef[::-1].astype(np.float32)
"""Coefficients of 2^x between 0 and 1, the highest power first: relative error under 4e-6, a 500th of bfloat16's."""

ZERO, ONE, HALF = np.float32(0), np.float32(1), np.float32(0.5)
TANH_SCALE, TANH_CUBE = np.float32(-2 * sqrt(2 / pi) / log(2)), np.float32(0.044715)
ERF_STEP = np.float32(0.3275911 / sqrt(2))
ERF = np.array([1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592], np.float32)


@compiled
def exp2_coefficients():
    """What `exp2` takes: vectors made once, outside of loops."""
    return spread(EXP2[0]), spread(EXP2[1]), spread(EXP2[2]), spread(EXP2[3]), spread(EXP2[4])


@compiled
def exp2(x, coefficients):
    """2^x, and 0 where that is too small."""
    a, b, c, d, e = coefficients
    rest = above_floor(x)
    power = multiply_add(multiply_add(multiply_add(multiply_add(a, rest, b), rest, c), rest, d), rest, e)
    return scale_by_power(power, x)


@compiled
def gelu_tanh(x, coefficients):
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), by 1 + tanh(u) = 2 / (1 + e^(-2 u)).

    Formula: Hendrycks & Gimpel 2016, arXiv:1606.08415.
    """
    inner = multiply(x, multiply_add(multiply(x, x), spread(TANH_CUBE), spread(ONE)))
    return divide(x, add(spread(ONE), exp2(multiply(inner, spread(TANH_SCALE)), coefficients)))


@compiled
def silu(x, coefficients):
    """x / (1 + e^(-x))."""
    return divide(x, add(spread(ONE), exp2(multiply(x, spread(-LOG2_E)), coefficients)))


@compiled
def gelu(x, coefficients):
    """x * P(X <= x) of the normal distribution, absolute error under 2e-7 times x.

    Formula: Abramowitz & Stegun 1964, 7.1.26: of |x|, the part beyond it is a polynomial in 1 / (1 + p |x|) times
    e^(-x^2 / 2) / 2.
    """
    size = magnitude(x)
    t = divide(spread(ONE), multiply_add(size, spread(ERF_STEP), spread(ONE)))
    beyond = multiply_add(spread(ERF[0]), t, spread(ERF[1]))
    beyond = multiply_add(beyond, t, spread(ERF[2]))
    beyond = multiply_add(beyond, t, spread(ERF[3]))
    beyond = multiply_add(beyond, t, spread(ERF[4]))
    density = exp2(multiply(multiply(size, size), spread(-HALF * LOG2_E)), coefficients)
    beyond = multiply(multiply(beyond, t), multiply(density, spread(HALF)))
    # x * (1 - beyond) where x > 0, x * beyond where it is not: both are (x + |x|) / 2 - |x| * beyond.
    return subtract(multiply(add(x, size), spread(HALF)), multiply(size, beyond))

"""The exponential function in instructions that vectorise; a library's takes one value at a time."""

from math import factorial, log

import numpy as np

from saccade.nn.kernels.compiled import inlined
from saccade.nn.kernels.words import power_of_two

LEAST = np.float32(-87)
LOG2_E = np.float32(1 / log(2))
LN_2_HIGH = np.float32(45426 / 65536)
LN_2_LOW = np.float32(log(2) - 45426 / 65536)
"""ln 2 in two parts: products of the first with whole numbers up to 2^7 are exact."""

COEFFICIENTS = tuple(np.float32(1 / factorial(power)) for power in range(7, -1, -1))
"""Of the Taylor series; on [-ln 2 / 2, ln 2 / 2] the first term left out is under 6e-9."""


@inlined
def exponential(x):
    """e^x of float32 x <= 0, relative error under 3e-7: e^x = 2^n * e^r with n whole and r small. Below -87, e^-87."""
    bounded = LEAST if x < LEAST else x
    n = np.floor(bounded * LOG2_E + np.float32(0.5))
    r = bounded - n * LN_2_HIGH - n * LN_2_LOW
    power = COEFFICIENTS[0]
    for coefficient in COEFFICIENTS[1:]:
        power = power * r + coefficient
    return power * power_of_two(np.int32(n))

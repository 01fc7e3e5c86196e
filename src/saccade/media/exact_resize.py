"""The reference processors' resize in numpy: exact for every size and on every CPU, but not fast.

Torch resizes uint8 in integer arithmetic. It computes weights in double precision, multiplies them by a power of two
and rounds them, so that the largest fits into 16 bits. A pass sums products and rounds to uint8 (torch 2.13,
aten/src/ATen/native/cpu/UpSampleKernel.cpp and UpSampleKernelAVXAntialias.h). All such sums are exact in float32, or in
float64 for many inputs, in any order of addition. So a matrix product can compute a pass.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Mode = Literal["bilinear", "bicubic", "lanczos"]
Numbers = npt.NDArray[np.float64]

MAX_WEIGHT = 1 << 15
MAX_PRECISION = 22
FLOAT32_EXACT = 1 << 24
"""All whole numbers below this are exact in float32."""

BLOCK = 16
"""Outputs of one product. More of them would share fewer inputs: most weights of the matrix are zero."""

BAND_BYTES = 1 << 20
"""Inputs of one product as floating-point numbers: about what a processor's cache keeps."""


@dataclass(frozen=True)
class Block:
    """A part of a pass: the outputs from *start* on are weights times inputs.

    - first: the index of the first input.
    - weights: float32 or float64 [outputs, inputs].
    """

    start: int
    first: int
    weights: npt.NDArray[Any]


def resize_planes(image: npt.NDArray[np.uint8], height: int, width: int, mode: Mode) -> npt.NDArray[np.uint8]:
    """Return *image* [old height, old width, channels] as planes [channels, *height*, *width*], uint8.

    Raises MemoryError if an allocation fails.
    """
    old_height, old_width, channels = image.shape
    horizontal, vertical = blocks(old_width, width, mode), blocks(old_height, height, mode)
    planes = np.empty((channels, height, width), np.uint8)
    for channel, plane in enumerate(planes):
        narrow = _resampled(image[..., channel].T, width, horizontal).T
        plane[:] = _resampled(narrow, height, vertical)
    return planes


def blocks(old: int, new: int, mode: Mode) -> tuple[Block, ...]:
    """Return the blocks that turn *old* inputs into *new* outputs; none if the sizes are equal."""
    if old == new:
        return ()
    first, weights, precision = integer_weights(old, new, mode)
    largest_sum = 255 * int(np.abs(weights).sum(axis=1).max()) + (1 << precision)
    dtype = np.float32 if largest_sum < FLOAT32_EXACT else np.float64
    scaled = np.ldexp(weights, -precision)
    products = []
    for start in range(0, new, BLOCK):
        shifts = first[start : start + BLOCK] - first[start]
        inputs = min(old - int(first[start]), int(shifts[-1]) + weights.shape[1])
        matrix = np.zeros((len(shifts), int(shifts[-1]) + weights.shape[1]), dtype)
        for row, shift in enumerate(shifts):
            matrix[row, shift : shift + weights.shape[1]] = scaled[start + row]
        products.append(Block(start, int(first[start]), matrix[:, :inputs]))
    return tuple(products)


def integer_weights(old: int, new: int, mode: Mode) -> tuple[npt.NDArray[np.int64], Numbers, int]:
    """Return each output's first input [new], the weights of its inputs [new, taps], and their precision in bits.

    Weights are whole numbers. An output with fewer inputs than taps has weights of 0 for the rest.
    """
    curve, half = CURVES[mode]
    scale = old / new
    stretch = max(scale, 1.0)
    support = half * stretch
    centre = scale * (np.arange(new) + 0.5)
    first = np.maximum((centre - support + 0.5).astype(np.int64), 0)
    num_inputs = np.minimum((centre + support + 0.5).astype(np.int64), old) - first
    taps = np.arange(num_inputs.max())
    weights = curve((taps + first[:, None] - centre[:, None] + 0.5) * (1 / stretch))
    weights[taps >= num_inputs[:, None]] = 0
    # One after the other, as torch adds them: numpy's sum() would round otherwise.
    weights /= np.cumsum(weights, axis=1)[:, -1:]
    largest = float(weights.max())
    precision = 0
    while precision < MAX_PRECISION and int(0.5 + math.ldexp(largest, precision + 1)) < MAX_WEIGHT:
        precision += 1
    scaled = np.ldexp(weights, precision)
    return first, np.trunc(scaled + np.copysign(0.5, scaled)), precision


def _resampled(source: npt.NDArray[np.uint8], new: int, products: tuple[Block, ...]) -> npt.NDArray[np.uint8]:
    """Resample *source* [old, lanes] to [*new*, lanes] by the blocks in *products*."""
    if not products:
        return source
    num_lanes = source.shape[1]
    out = np.empty((new, num_lanes), np.uint8)
    for block in products:
        num_outputs, num_inputs = block.weights.shape
        step = max(1, BAND_BYTES // (num_inputs * block.weights.itemsize))
        for lane in range(0, num_lanes, step):
            band = source[block.first : block.first + num_inputs, lane : lane + step].astype(block.weights.dtype)
            sums = block.weights @ band
            sums += 0.5
            # Conversion cuts the fraction off, so this rounds.
            np.clip(sums, 0, 255, out=sums)
            out[block.start : block.start + num_outputs, lane : lane + step] = sums
    return out


def _bilinear(distance: Numbers) -> Numbers:
    """Return the weights of the triangle filter."""
    return np.where(np.abs(distance) < 1, 1 - np.abs(distance), 0.0)


def _bicubic(distance: Numbers) -> Numbers:
    """Return the weights of cubic convolution with a = -0.5."""
    a, x = -0.5, np.abs(distance)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def _lanczos(distance: Numbers) -> Numbers:
    """Return the weights of a sinc windowed by a sinc three times as wide."""
    return np.where(np.abs(distance) < 3, np.sinc(distance) * np.sinc(distance / 3), 0.0)


CURVES: dict[Mode, tuple[Callable[[Numbers], Numbers], float]] = {
    "bilinear": (_bilinear, 1.0),
    "bicubic": (_bicubic, 2.0),
    "lanczos": (_lanczos, 3.0),
}
"""Each filter, and how far it reaches to one side, in inputs or outputs, whichever are wider."""

"""Linear layers in bfloat16 by AMX: rows times a weight that was laid out for it, float32 until the result is rounded.

A row's result does not depend on the rows beside it, nor on how many there are. Shapes: N rows, K inputs, M outputs,
J = M / 32 blocks of outputs, S = K / 32 steps.
"""

import numpy as np
import numpy.typing as npt
from numba import carray

from saccade.nn.kernels import tiles
from saccade.nn.kernels.compiled import compiled
from saccade.nn.kernels.machine_code import Body
from saccade.nn.kernels.team import kernel, own_share, room
from saccade.nn.kernels.vector_math import exp2_coefficients, gelu, gelu_tanh, silu
from saccade.nn.kernels.vectors import LANES, VECTOR_BYTES, add, load, load_lower, load_upper, store, store_pairs

BLOCK, CHUNK = 32, 256
"""Rows, and outputs, of two tiles side by side; rows that one block of the weight meets before the next."""

NONE, GELU, GELU_TANH, SILU = range(4)


def lay_out(words_MW: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Return a weight's words of bfloat16 as tiles [J, S, 2, 16, 16]; M must be of blocks, W of 16 words.

    Of a block's outputs the even ones are one tile and the odd ones the other, so that two of them make a word.
    """
    num_outputs, width = words_MW.shape
    out = tiles.empty(np.uint32, num_outputs // BLOCK, width // LANES, 2, LANES, LANES)
    # [J, lane, even or odd, S, row] to [J, S, even or odd, row, lane].
    out[:] = words_MW.reshape(-1, LANES, 2, width // LANES, LANES).transpose(0, 3, 2, 4, 1)
    return out


def lay_out_bias(bias_M: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return a bias in the order of `lay_out`, [J, 2, 16]."""
    out = tiles.empty(np.float32, len(bias_M) // BLOCK, 2, LANES)
    out[:] = bias_M.reshape(-1, LANES, 2).swapaxes(1, 2)
    return out


CONFIGURATION = tiles.configuration()


@compiled
def _product_of_two(rows, stride, weights, num_steps, sums):
    """Two tiles of rows by two of outputs."""
    tiles.zero(0)
    tiles.zero(1)
    tiles.zero(2)
    tiles.zero(3)
    for step in range(num_steps):
        row, weight = rows + step * tiles.ROW_BYTES, weights + 2 * step * tiles.TILE_BYTES
        tiles.load(4, row, stride)
        tiles.load(5, row + tiles.ROWS * stride, stride)
        tiles.load(6, weight, VECTOR_BYTES)
        tiles.load(7, weight + tiles.TILE_BYTES, VECTOR_BYTES)
        tiles.dot(0, 4, 6)
        tiles.dot(1, 4, 7)
        tiles.dot(2, 5, 6)
        tiles.dot(3, 5, 7)
    tiles.store(0, sums, 2 * VECTOR_BYTES)
    tiles.store(1, sums + VECTOR_BYTES, 2 * VECTOR_BYTES)
    tiles.store(2, sums + 2 * tiles.TILE_BYTES, 2 * VECTOR_BYTES)
    tiles.store(3, sums + 2 * tiles.TILE_BYTES + VECTOR_BYTES, 2 * VECTOR_BYTES)


@compiled
def _product_of_one(rows, stride, weights, num_steps, sums):
    """One tile of rows by two of outputs."""
    tiles.zero(0)
    tiles.zero(1)
    for step in range(num_steps):
        weight = weights + 2 * step * tiles.TILE_BYTES
        tiles.load(4, rows + step * tiles.ROW_BYTES, stride)
        tiles.load(6, weight, VECTOR_BYTES)
        tiles.load(7, weight + tiles.TILE_BYTES, VECTOR_BYTES)
        tiles.dot(0, 4, 6)
        tiles.dot(1, 4, 7)
    tiles.store(0, sums, 2 * VECTOR_BYTES)
    tiles.store(1, sums + VECTOR_BYTES, 2 * VECTOR_BYTES)


@compiled
def _finish(sums, bias, activation, residual, out, coefficients):
    """Write a row of a block: sums and bias, through the activation, plus the residual where there is one."""
    even, odd = add(load(sums), load(bias)), add(load(sums + VECTOR_BYTES), load(bias + VECTOR_BYTES))
    if activation == GELU:
        even, odd = gelu(even, coefficients), gelu(odd, coefficients)
    elif activation == GELU_TANH:
        even, odd = gelu_tanh(even, coefficients), gelu_tanh(odd, coefficients)
    elif activation == SILU:
        even, odd = silu(even, coefficients), silu(odd, coefficients)
    if residual:
        even, odd = add(even, load_lower(residual)), add(odd, load_upper(residual))
    store_pairs(out, even, odd)


@compiled
def _copy(source, num_rows, stride, target):
    for offset in range(0, num_rows * stride, VECTOR_BYTES):
        store(target + offset, load(source + offset))


@kernel()
def multiply() -> Body:
    """Return the kernel, compiled. It writes activation(x W^T + bias) + residual into *out* [N, M].

    Its arguments are (address of x [N, K], N, J, S, address of the tiles, address of the bias, activation, address of
    the residual [N, M] or 0 for none, address of out). All matrices are bfloat16 without gaps.
    """

    def run(data):
        x, num_rows, num_blocks, num_steps, weight, bias, activation, residual, out, room_start, room_bytes = carray(
            data, 11, np.int64
        )
        num_row_blocks = (num_rows + BLOCK - 1) // BLOCK
        first_row, last_row, first_block, last_block = 0, num_rows, 0, num_blocks
        # Of what there is more. Then the other is read by every thread.
        if num_row_blocks > num_blocks:
            first_row, last_row = own_share(num_row_blocks)
            first_row, last_row = first_row * BLOCK, min(last_row * BLOCK, num_rows)
        else:
            first_block, last_block = own_share(num_blocks)
        coefficients = exp2_coefficients()
        stride, out_stride = num_steps * VECTOR_BYTES, num_blocks * VECTOR_BYTES
        weight_bytes = num_steps * 2 * tiles.TILE_BYTES
        # The sums of four tiles, and rows where they are no whole tiles: those are read as a whole.
        sums = room(room_start, room_bytes)
        rest = sums + 4 * tiles.TILE_BYTES
        num_left = (last_row - first_row) % BLOCK
        _copy(x + (last_row - num_left) * stride, num_left, stride, rest)
        before = tiles.configure(CONFIGURATION.ctypes.data)
        for chunk in range(first_row, last_row, CHUNK):
            for block in range(first_block, last_block):
                for begin in range(chunk, min(chunk + CHUNK, last_row), BLOCK):
                    num_here = min(BLOCK, last_row - begin)
                    rows = x + begin * stride if num_here == BLOCK else rest
                    if num_here > tiles.ROWS:
                        _product_of_two(rows, stride, weight + block * weight_bytes, num_steps, sums)
                    else:
                        _product_of_one(rows, stride, weight + block * weight_bytes, num_steps, sums)
                    for n in range(num_here):
                        place = (begin + n) * out_stride + block * VECTOR_BYTES
                        added = residual + place if residual else 0
                        row = sums + 2 * n * VECTOR_BYTES
                        _finish(row, bias + 2 * block * VECTOR_BYTES, activation, added, out + place, coefficients)
        tiles.release(before)

    return run


def room_bytes(num_steps: int) -> int:
    """Return what `multiply` needs: sums of four tiles, and a block of rows."""
    return 4 * tiles.TILE_BYTES + BLOCK * num_steps * VECTOR_BYTES

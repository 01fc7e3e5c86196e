"""Attention in bfloat16 by AMX: softmax(Q K^T) V, a block of keys after another, scores and sums in float32.

Formula: Dao 2023, arXiv:2307.08691, algorithm 1, with everything transposed: a row of scores is one key, a column one
query. So the softmax goes from row to row with sixteen queries in a register, and never across one.

Shapes: N query tokens, L key tokens, Q query heads, K key/value heads, W words of a head (saccade.nn.kernels.words),
two tiles of C = 16 queries. Keys stand in rows of S whole tiles, values with D channels for rows.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import types

from saccade.nn.kernels import tiles
from saccade.nn.kernels.compiled import compiled, compiled_for
from saccade.nn.kernels.vector_math import LOG2_E, exp2, exp2_coefficients
from saccade.nn.kernels.vectors import (
    LANES,
    VECTOR_BYTES,
    add,
    largest,
    load,
    multiply,
    multiply_add,
    spread,
    store,
    store_shares,
    subtract,
)
from saccade.nn.kernels.words import pack

QUERIES, KEYS = 32, 128
"""Of a block: two tiles of queries, and as many keys as leave their scores in the first cache."""

TILE_KEYS = 32
LOW, HIGH = np.uint32(0xFFFF), np.uint32(0xFFFF0000)
ZERO, HIDDEN = np.float32(0), np.float32(-1e30)
CONFIGURATION = tiles.configuration()
SCORES_BYTES, SHARES_BYTES = KEYS * VECTOR_BYTES, KEYS // 2 * VECTOR_BYTES
"""Of one tile of queries."""


class Scratch(NamedTuple):
    """What a call works in: keys [L, 16 S], values [D, L / 2], queries [S, 2, 16, C], mixed [D / 16, 2, 16, C].

    Lengths are of whole tiles. *mixed* are sums of values that *scores* of all keys so far weigh, *sums* [2, 2, C] the
    largest score and the sum of weights, for both tiles of queries; *shares* are weights as words of two keys.
    """

    keys: Any
    values: Any
    queries: Any
    mixed: Any
    scores: Any
    shares: Any
    sums: Any
    words: Any


def _array(dimensions: int, kind: Any = types.uint32, layout: str = "C") -> Any:
    return types.Array(kind, dimensions, layout)


HEADS, FLOATS = _array(3, layout="A"), _array(3, types.float32)
SCRATCH = [_array(2), _array(2), _array(4), _array(4, types.float32), FLOATS, _array(3), FLOATS, _array(3)]
SIGNATURE = types.void(
    *[HEADS, HEADS, HEADS, types.float32, types.int64],
    *[types.UniTuple(types.int64, 2), types.NamedTuple(SCRATCH, Scratch), HEADS],
)


@compiled
def _lay_out_keys(k_LKW, head, keys_LW):
    for t in range(k_LKW.shape[0]):
        for w in range(k_LKW.shape[2]):
            keys_LW[t, w] = k_LKW[t, head, w]


@compiled
def _lay_out_values(v_LKW, head, values_DL):
    length = v_LKW.shape[0]
    for i in range((length + 1) // 2):
        for w in range(v_LKW.shape[2]):
            a = v_LKW[2 * i, head, w]
            b = v_LKW[2 * i + 1, head, w] if 2 * i + 1 < length else np.uint32(0)
            values_DL[2 * w, i] = (a & LOW) | (b << np.uint32(16))
            values_DL[2 * w + 1, i] = (a >> np.uint32(16)) | (b & HIGH)


@compiled
def _lay_out_queries(q_NQW, head, begin, queries_S2WC):
    for n in range(begin, min(begin + QUERIES, q_NQW.shape[0])):
        tile, lane = (n - begin) // LANES, (n - begin) % LANES
        for w in range(q_NQW.shape[2]):
            queries_S2WC[w // LANES, tile, w % LANES, lane] = q_NQW[n, head, w]


@compiled
def _score(keys, stride, queries, num_keys, scores):
    """Two tiles of keys by two of queries at a time."""
    for t in range(0, num_keys, TILE_KEYS):
        row, out = keys + t * stride, scores + t * VECTOR_BYTES
        tiles.zero(0)
        tiles.zero(1)
        tiles.zero(2)
        tiles.zero(3)
        for offset in range(0, stride, tiles.ROW_BYTES):
            query, key = queries + 2 * tiles.ROWS * offset, row + offset
            tiles.load(4, query, VECTOR_BYTES)
            tiles.load(5, query + tiles.TILE_BYTES, VECTOR_BYTES)
            tiles.load(6, key, stride)
            tiles.load(7, key + tiles.ROWS * stride, stride)
            tiles.dot(0, 6, 4)
            tiles.dot(1, 6, 5)
            tiles.dot(2, 7, 4)
            tiles.dot(3, 7, 5)
        tiles.store(0, out, VECTOR_BYTES)
        tiles.store(1, out + SCORES_BYTES, VECTOR_BYTES)
        tiles.store(2, out + tiles.TILE_BYTES, VECTOR_BYTES)
        tiles.store(3, out + SCORES_BYTES + tiles.TILE_BYTES, VECTOR_BYTES)


@compiled
def _hide(scores_2TC, num_visible, num_left, num_keys):
    """Query c sees num_visible + c of the keys, and only those that are *num_left*."""
    for t in range(max(0, min(num_visible, num_left)), num_keys):
        for c in range(QUERIES):
            if t >= min(num_visible + c, num_left):
                scores_2TC[c // LANES, t, c % LANES] = HIDDEN


@compiled
def _softmax(scores, shares, num_keys, scale, coefficients, sums, mixed, num_tiles):
    """Turn scores into shares of a sum that is not complete; what was summed before is brought to the same scale."""
    a = b = c = d = load(scores)
    for t in range(0, num_keys, 4):
        row = scores + t * VECTOR_BYTES
        a, b = largest(a, load(row)), largest(b, load(row + VECTOR_BYTES))
        c, d = largest(c, load(row + 2 * VECTOR_BYTES)), largest(d, load(row + 3 * VECTOR_BYTES))
    before = load(sums)
    after = largest(multiply(largest(largest(a, b), largest(c, d)), scale), before)
    store(sums, after)
    correction = exp2(subtract(before, after), coefficients)
    for row in range(num_tiles * tiles.ROWS):
        address = mixed + row // tiles.ROWS * 2 * tiles.TILE_BYTES + row % tiles.ROWS * VECTOR_BYTES
        store(address, multiply(load(address), correction))
    less, even, odd = subtract(spread(ZERO), after), multiply(load(sums + VECTOR_BYTES), correction), spread(ZERO)
    for t in range(0, num_keys, 2):
        row = scores + t * VECTOR_BYTES
        x = exp2(multiply_add(load(row), scale, less), coefficients)
        y = exp2(multiply_add(load(row + VECTOR_BYTES), scale, less), coefficients)
        even, odd = add(even, x), add(odd, y)
        store_shares(shares + t // 2 * VECTOR_BYTES, x, y)
    store(sums + VECTOR_BYTES, add(even, odd))


@compiled
def _mix(values, stride, shares, num_keys, mixed, num_tiles):
    """Two tiles of channels by two of queries at a time."""
    for tile in range(0, num_tiles, 2):
        row, out = values + tile * tiles.ROWS * stride, mixed + 2 * tile * tiles.TILE_BYTES
        tiles.load(0, out, VECTOR_BYTES)
        tiles.load(1, out + tiles.TILE_BYTES, VECTOR_BYTES)
        tiles.load(2, out + 2 * tiles.TILE_BYTES, VECTOR_BYTES)
        tiles.load(3, out + 3 * tiles.TILE_BYTES, VECTOR_BYTES)
        for t in range(0, num_keys, TILE_KEYS):
            share, value = shares + t // 2 * VECTOR_BYTES, row + 2 * t
            tiles.load(4, share, VECTOR_BYTES)
            tiles.load(5, share + SHARES_BYTES, VECTOR_BYTES)
            tiles.load(6, value, stride)
            tiles.load(7, value + tiles.ROWS * stride, stride)
            tiles.dot(0, 6, 4)
            tiles.dot(1, 6, 5)
            tiles.dot(2, 7, 4)
            tiles.dot(3, 7, 5)
        tiles.store(0, out, VECTOR_BYTES)
        tiles.store(1, out + tiles.TILE_BYTES, VECTOR_BYTES)
        tiles.store(2, out + 2 * tiles.TILE_BYTES, VECTOR_BYTES)
        tiles.store(3, out + 3 * tiles.TILE_BYTES, VECTOR_BYTES)


@compiled
def _write(mixed_D2RC, sums_22C, words_2WC, head, begin, out_NQW):
    width = out_NQW.shape[2]
    for tile in range(2):
        for c in range(LANES):
            sums_22C[tile, 1, c] = np.float32(1) / sums_22C[tile, 1, c]
        for w in range(width):
            d, row = 2 * w // LANES, 2 * w % LANES
            for c in range(LANES):
                share = sums_22C[tile, 1, c]
                a, b = mixed_D2RC[d, tile, row, c] * share, mixed_D2RC[d, tile, row + 1, c] * share
                words_2WC[tile, w, c] = pack(words_2WC[tile, w, c], a, b)
    for n in range(begin, min(begin + QUERIES, out_NQW.shape[0])):
        tile, lane = (n - begin) // LANES, (n - begin) % LANES
        for w in range(width):
            out_NQW[n, head, w] = words_2WC[tile, w, lane]


def _attend(q_NQW, k_LKW, v_LKW, scale, offset, heads, scratch, out_NQW):
    keys, values, queries, mixed, scores, shares, sums, words = scratch
    length, group = k_LKW.shape[0], q_NQW.shape[1] // k_LKW.shape[1]
    key_stride, value_stride, num_tiles = 4 * keys.shape[1], 4 * values.shape[1], mixed.shape[0]
    scales, coefficients = spread(scale * LOG2_E), exp2_coefficients()
    tiles.configure(CONFIGURATION.ctypes.data)
    for head in range(heads[0] * group, heads[1] * group):
        if head % group == 0:
            _lay_out_keys(k_LKW, head // group, keys)
            _lay_out_values(v_LKW, head // group, values)
        for begin in range(0, q_NQW.shape[0], QUERIES):
            _lay_out_queries(q_NQW, head, begin, queries)
            mixed[:] = ZERO
            sums[:, 0] = HIDDEN
            sums[:, 1] = ZERO
            end = min(length, begin + QUERIES + offset)
            for block in range(0, end, KEYS):
                num_keys = min(KEYS, (end - block + TILE_KEYS - 1) // TILE_KEYS * TILE_KEYS)
                row = keys.ctypes.data + block * key_stride
                _score(row, key_stride, queries.ctypes.data, num_keys, scores.ctypes.data)
                _hide(scores, begin + offset + 1 - block, length - block, num_keys)
                for tile in range(2):
                    _softmax(
                        scores.ctypes.data + tile * SCORES_BYTES, shares.ctypes.data + tile * SHARES_BYTES, num_keys,
                        scales, coefficients, sums.ctypes.data + 2 * tile * VECTOR_BYTES,
                        mixed.ctypes.data + tile * tiles.TILE_BYTES, num_tiles,
                    )  # fmt: skip
                column = values.ctypes.data + 2 * block
                _mix(column, value_stride, shares.ctypes.data, num_keys, mixed.ctypes.data, num_tiles)
            _write(mixed, sums, words, head, begin, out_NQW)
    tiles.release()


@cache
def kernel() -> Any:
    """Return it compiled, for arrays of any size."""
    return compiled_for(SIGNATURE)(_attend)


def attend(
    q_NQW: npt.NDArray[np.uint32],
    k_LKW: npt.NDArray[np.uint32],
    v_LKW: npt.NDArray[np.uint32],
    scale: np.float32,
    offset: int,
    heads: tuple[int, int],
    out_NQW: npt.NDArray[np.uint32],
) -> None:
    """Write softmax(scale * Q K^T) V into out [N, Q, W], for key/value heads [first, last) and the queries' of them.

    q [N, Q, W], k and v [L, K, W] are words of bfloat16, rows of words without gaps. Query n sees the keys up to
    n + *offset*, at least one.
    """
    length, _, width = k_LKW.shape
    steps, room = -(-width // LANES), -(-length // TILE_KEYS) * TILE_KEYS
    scratch = Scratch(
        keys=tiles.zeros(np.uint32, room, steps * LANES),
        values=tiles.zeros(np.uint32, 2 * steps * LANES, room // 2),
        queries=tiles.zeros(np.uint32, steps, 2, LANES, LANES),
        mixed=tiles.zeros(np.float32, 2 * steps, 2, LANES, LANES),
        scores=tiles.zeros(np.float32, 2, KEYS, LANES),
        shares=tiles.zeros(np.uint32, 2, KEYS // 2, LANES),
        sums=tiles.zeros(np.float32, 2, 2, LANES),
        words=tiles.zeros(np.uint32, 2, width, LANES),
    )
    kernel()(q_NQW, k_LKW, v_LKW, scale, offset, heads, scratch, out_NQW)

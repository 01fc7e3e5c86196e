"""Attention in bfloat16 by AMX: softmax(Q K^T) V, a block of keys after another, scores and sums in float32.

Formula: Dao 2023, arXiv:2307.08691, algorithm 1, with everything transposed: a row of scores is one key, a column one
query. So the softmax goes from row to row with sixteen queries in a register, and never across one.

Shapes: N query tokens, L key tokens, Q query heads, K key/value heads, W words of a head (saccade.nn.kernels.words),
two tiles of C = 16 queries. Keys stand in rows of S whole tiles, values with D channels for rows.
"""

import numpy as np
import torch
from numba import carray
from numba.extending import register_jitable

from saccade.nn.kernels import tiles
from saccade.nn.kernels.compiled import compiled
from saccade.nn.kernels.machine_code import Body
from saccade.nn.kernels.team import kernel, own_share, pointer, room
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
def _write(mixed_D2RC, sums_22C, words_2WC, head, begin, out_NW):
    width = words_2WC.shape[1]
    for tile in range(2):
        for c in range(LANES):
            sums_22C[tile, 1, c] = np.float32(1) / sums_22C[tile, 1, c]
        for w in range(width):
            d, row = 2 * w // LANES, 2 * w % LANES
            for c in range(LANES):
                share = sums_22C[tile, 1, c]
                a, b = mixed_D2RC[d, tile, row, c] * share, mixed_D2RC[d, tile, row + 1, c] * share
                words_2WC[tile, w, c] = pack(words_2WC[tile, w, c], a, b)
    for n in range(begin, min(begin + QUERIES, out_NW.shape[0])):
        tile, lane = (n - begin) // LANES, (n - begin) % LANES
        for w in range(width):
            out_NW[n, head * width + w] = words_2WC[tile, w, lane]


@compiled
def _clear(start, nbytes):
    """What is read beyond a head's width, or beyond the last key, must be numbers."""
    for place in range(start, start + nbytes, VECTOR_BYTES):
        store(place, spread(ZERO))


@register_jitable
def _places(num_keys, num_steps, width):
    """Return where keys, values, queries, what is mixed, scores, shares, sums and words lie, and the size of all."""
    keys = num_keys * num_steps * VECTOR_BYTES
    values = keys + num_keys * num_steps * VECTOR_BYTES
    queries = values + num_steps * 2 * tiles.TILE_BYTES
    mixed = queries + num_steps * 4 * tiles.TILE_BYTES
    scores = mixed + 2 * SCORES_BYTES
    shares = scores + 2 * SHARES_BYTES
    sums = shares + 4 * VECTOR_BYTES
    return 0, keys, values, queries, mixed, scores, shares, sums, sums + 2 * width * VECTOR_BYTES


@register_jitable
def _sizes(length, width):
    """Return how many keys of whole tiles there are, and how many tiles of words a head has."""
    return (length + TILE_KEYS - 1) // TILE_KEYS * TILE_KEYS, (width + LANES - 1) // LANES


@kernel()
def attention() -> Body:
    """Return the kernel; its arguments are as `attend` has them, strides in words."""

    def run(data):
        (
            q, k, v, out, q_stride, k_stride, v_stride, num_queries, length, num_heads, group, width, offset,
            room_start, room_bytes,
        ) = carray(data, 15, np.int64)  # fmt: skip
        num_blocks = (num_queries + QUERIES - 1) // QUERIES
        first, last = own_share(num_heads * num_blocks)
        if first == last:
            return
        q_NW = carray(pointer(q), (num_queries, q_stride), np.uint32)
        k_LW = carray(pointer(k), (length, k_stride), np.uint32)
        v_LW = carray(pointer(v), (length, v_stride), np.uint32)
        out_NW = carray(pointer(out), (num_queries, num_heads * width), np.uint32)
        num_keys, num_steps = _sizes(length, width)
        num_tiles = 2 * num_steps
        key_stride, value_stride = num_steps * VECTOR_BYTES, 2 * num_keys
        start = room(room_start, room_bytes)
        _clear(start, room_bytes)
        at_keys, at_values, at_queries, at_mixed, at_scores, at_shares, at_sums, at_words, _ = _places(
            num_keys, num_steps, width
        )
        keys = carray(pointer(start + at_keys), (num_keys, num_steps * LANES), np.uint32)
        values = carray(pointer(start + at_values), (num_tiles * LANES, num_keys // 2), np.uint32)
        queries = carray(pointer(start + at_queries), (num_steps, 2, LANES, LANES), np.uint32)
        mixed = carray(pointer(start + at_mixed), (num_tiles, 2, LANES, LANES), np.float32)
        scores = carray(pointer(start + at_scores), (2, KEYS, LANES), np.float32)
        shares = start + at_shares
        sums = carray(pointer(start + at_sums), (2, 2, LANES), np.float32)
        words = carray(pointer(start + at_words), (2, width, LANES), np.uint32)
        scales, coefficients = spread(np.float32((2 * width) ** -0.5) * LOG2_E), exp2_coefficients()
        before = tiles.configure(CONFIGURATION.ctypes.data)
        laid_out = -1
        for item in range(first, last):
            head, begin = item // num_blocks, item % num_blocks * QUERIES
            if head // group != laid_out:
                laid_out = head // group
                _lay_out_keys(k_LW, width, laid_out, keys)
                _lay_out_values(v_LW, width, laid_out, values)
            _lay_out_queries(q_NW, width, head, begin, queries)
            mixed[:] = ZERO
            sums[:, 0] = HIDDEN
            sums[:, 1] = ZERO
            end = min(length, begin + QUERIES + offset)
            for block in range(0, end, KEYS):
                num_here = min(KEYS, (end - block + TILE_KEYS - 1) // TILE_KEYS * TILE_KEYS)
                row = keys.ctypes.data + block * key_stride
                _score(row, key_stride, queries.ctypes.data, num_here, scores.ctypes.data)
                _hide(scores, begin + offset + 1 - block, length - block, num_here)
                for tile in range(2):
                    _softmax(
                        scores.ctypes.data + tile * SCORES_BYTES, shares + tile * SHARES_BYTES, num_here,
                        scales, coefficients, sums.ctypes.data + 2 * tile * VECTOR_BYTES,
                        mixed.ctypes.data + tile * tiles.TILE_BYTES, num_tiles,
                    )  # fmt: skip
                column = values.ctypes.data + 2 * block
                _mix(column, value_stride, shares, num_here, mixed.ctypes.data, num_tiles)
            _write(mixed, sums, words, head, begin, out_NW)
        tiles.release(before)

    return run


def attend(
    q_NQD: torch.Tensor,
    k_LKD: torch.Tensor,
    v_LKD: torch.Tensor,
    offset: int,
    out_NQD: torch.Tensor,
    num_threads: int = 1,
) -> None:
    """Write softmax(Q K^T / sqrt(D)) V into out [N, Q, D], without gaps.

    q [N, Q, D], k and v [L, K, D] are bfloat16, D = 2 W; between tokens, and only there, may be gaps, of whole words.
    Query n sees the keys up to n + *offset*, at least one.
    """
    num_queries, num_heads, head_dim = q_NQD.shape
    length, num_kv_heads, _ = k_LKD.shape
    arrays = (q_NQD, k_LKD, v_LKD)
    addresses = [array.data_ptr() for array in (*arrays, out_NQD)]
    strides = [array.stride(0) // 2 for array in arrays]
    sizes = (num_queries, length, num_heads, num_heads // num_kv_heads, head_dim // 2, offset)
    room_bytes = _places(*_sizes(length, head_dim // 2), head_dim // 2)[-1]
    attention()((*addresses, *strides, *sizes), num_threads, room_bytes)

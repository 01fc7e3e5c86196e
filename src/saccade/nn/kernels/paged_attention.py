"""One query token a row over its paged keys and values, read where they lie.

Shapes: S rows, Q query heads, K key/value heads, G = Q / K, B tokens of a block, M blocks of the longest table, W words
of a head (saccade.nn.kernels.words).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray

from saccade.nn.kernels.compiled import inlined
from saccade.nn.kernels.exponential import exponential
from saccade.nn.kernels.machine_code import Body
from saccade.nn.kernels.team import kernel, own_share, pointer, room
from saccade.nn.kernels.words import first, pack, second

ZERO = np.float32(0)


@inlined
def _softmax(scores_L, largest):
    total = ZERO
    for i in range(scores_L.shape[0]):
        scores_L[i] = exponential(scores_L[i] - largest)
        total += scores_L[i]
    share = np.float32(1) / total
    for i in range(scores_L.shape[0]):
        scores_L[i] *= share


def _scores(num_kv_heads: int, group: int, width: int) -> Callable[..., None]:
    @inlined
    def scores(block_BKW, head, num_tokens, lower_QW, upper_QW, scores_QB, largest_Q):
        for t in range(num_tokens):
            for k in range(num_kv_heads):
                for g in range(group):
                    h, product = k * group + g, ZERO
                    for i in range(width):
                        word = block_BKW[t, head + k, i]
                        product += lower_QW[h, i] * first(word) + upper_QW[h, i] * second(word)
                    scores_QB[h, t] = product
                    largest_Q[h] = max(largest_Q[h], product)

    return scores


def _mixture(num_kv_heads: int, group: int, width: int) -> Callable[..., None]:
    @inlined
    def mixture(block_BKW, head, num_tokens, scores_QB, lower_QW, upper_QW):
        for t in range(num_tokens):
            for k in range(num_kv_heads):
                for g in range(group):
                    h = k * group + g
                    share = scores_QB[h, t]
                    for i in range(width):
                        word = block_BKW[t, head + k, i]
                        lower_QW[h, i] += share * first(word)
                        upper_QW[h, i] += share * second(word)

    return mixture


@kernel()
def attend(word: Any, num_kv_heads: int, group: int, block_size: int, width: int) -> Body:
    """Return the kernel for a type of words, K, G, B and W: loops of known length take half the time.

    Its arguments are q [S, Q, W], S, out [S, Q, W], keys [blocks, B, all K, W], values, blocks, all K, tables
    int64 [S, M], M, lengths int64 [S], scale, parts int64 [P, 4], P. A part is (its first row, the row behind its
    last, head, K): it attends by K key/value heads, of which there may be more, from *head* on. Threads share parts.
    """
    num_heads = num_kv_heads * group
    score, mix = _scores(num_kv_heads, group, width), _mixture(num_kv_heads, group, width)

    def run(data):
        (
            q, num_rows, out, keys, values, num_blocks, all_heads, tables, longest, lengths, scale_bits, parts, count,
            room_start, room_bytes,
        ) = carray(data, 15, np.int64)  # fmt: skip
        q_SQW = carray(pointer(q), (num_rows, all_heads * group, width), word)
        out_SQW = carray(pointer(out), (num_rows, all_heads * group, width), word)
        cache_shape = (num_blocks, block_size, all_heads, width)
        keys_LBKW, values_LBKW = carray(pointer(keys), cache_shape, word), carray(pointer(values), cache_shape, word)
        tables_SM = carray(pointer(tables), (num_rows, longest), np.int64)
        lengths_S = carray(pointer(lengths), num_rows, np.int64)
        parts_P4 = carray(pointer(parts), (count, 4), np.int64)
        scale = first(np.uint64(scale_bits))
        start = room(room_start, room_bytes)
        lower = carray(pointer(start), (num_heads, width), np.float32)
        upper = carray(pointer(start + 4 * num_heads * width), (num_heads, width), np.float32)
        scores = carray(pointer(start + 8 * num_heads * width), (num_heads, longest * block_size), np.float32)
        largest = carray(pointer(start + 4 * num_heads * (2 * width + longest * block_size)), num_heads, np.float32)
        first_part, last_part = own_share(count)
        for p in range(first_part, last_part):
            head = parts_P4[p, 2]
            for s in range(parts_P4[p, 0], parts_P4[p, 1]):
                length = lengths_S[s]
                for h in range(num_heads):
                    largest[h] = -np.inf
                    for i in range(width):
                        both = q_SQW[s, head * group + h, i]
                        lower[h, i], upper[h, i] = first(both) * scale, second(both) * scale
                for start in range(0, length, block_size):
                    num_tokens, block = min(block_size, length - start), tables_SM[s, start // block_size]
                    score(keys_LBKW[block], head, num_tokens, lower, upper, scores[:, start:], largest)
                for h in range(num_heads):
                    _softmax(scores[h, :length], largest[h])
                    for i in range(width):
                        lower[h, i] = upper[h, i] = ZERO
                for start in range(0, length, block_size):
                    num_tokens, block = min(block_size, length - start), tables_SM[s, start // block_size]
                    mix(values_LBKW[block], head, num_tokens, scores[:, start:], lower, upper)
                for h in range(num_heads):
                    for i in range(width):
                        both = q_SQW[s, head * group + h, i]
                        out_SQW[s, head * group + h, i] = pack(both, lower[h, i], upper[h, i])

    return run


def room_bytes(num_heads: int, width: int, num_tokens: int) -> int:
    """Return what `attend` needs for so many query heads of a part, and tokens of the longest table."""
    return 4 * num_heads * (2 * width + num_tokens + 1)

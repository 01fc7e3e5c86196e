"""One query token a row over its paged keys and values, read where they lie.

Shapes: S rows, Q query heads, K key/value heads, G = Q / K, B tokens of a block, M blocks of the longest table, W words
of a head (saccade.nn.kernels.words).
"""

from collections.abc import Callable
from functools import cache

import numpy as np

from saccade.nn.kernels.compiled import compiled, inlined
from saccade.nn.kernels.exponential import exponential
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


@cache
def attend(num_kv_heads: int, group: int, block_size: int, width: int) -> Callable[..., None]:
    """Return the kernel for K, G, B and W: loops of known length take half the time.

    It is called with (q [S, Q, W], keys and values [blocks, B, K, W], tables int64 [S, M], lengths int64 [S], scale,
    head, out [S, Q, W]). There may be more heads than the K; it attends by those from key/value head *head* on.
    """
    num_heads = num_kv_heads * group
    score, mix = _scores(num_kv_heads, group, width), _mixture(num_kv_heads, group, width)

    @compiled
    def kernel(q, keys, values, tables, lengths, scale, head, out):
        lower, upper = np.empty((num_heads, width), np.float32), np.empty((num_heads, width), np.float32)
        scores = np.empty((num_heads, tables.shape[1] * block_size), np.float32)
        largest = np.empty(num_heads, np.float32)
        for s in range(q.shape[0]):
            for h in range(num_heads):
                largest[h] = -np.inf
                for i in range(width):
                    word = q[s, head * group + h, i]
                    lower[h, i], upper[h, i] = first(word) * scale, second(word) * scale
            for start in range(0, lengths[s], block_size):
                num_tokens = min(block_size, lengths[s] - start)
                score(keys[tables[s, start // block_size]], head, num_tokens, lower, upper, scores[:, start:], largest)
            for h in range(num_heads):
                _softmax(scores[h, : lengths[s]], largest[h])
                for i in range(width):
                    lower[h, i] = upper[h, i] = ZERO
            for start in range(0, lengths[s], block_size):
                num_tokens = min(block_size, lengths[s] - start)
                mix(values[tables[s, start // block_size]], head, num_tokens, scores[:, start:], lower, upper)
            for h in range(num_heads):
                for i in range(width):
                    out[s, head * group + h, i] = pack(q[s, head * group + h, i], lower[h, i], upper[h, i])

    return kernel

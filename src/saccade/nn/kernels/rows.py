"""Norms, rotary positions and the gate of an MLP, each in one pass over its rows, which threads share.

Arrays are of words (saccade.nn.kernels.words), without gaps: x [N, W] is N rows of 2 W values. All is computed in
float32 and rounded once. What is public here takes a type of words and returns the kernel for it, compiled.
"""

from typing import Any

import numpy as np
from numba import carray

from saccade.nn.kernels.compiled import inlined
from saccade.nn.kernels.exponential import exponential
from saccade.nn.kernels.machine_code import Body
from saccade.nn.kernels.team import kernel, own_share, pointer
from saccade.nn.kernels.words import first, pack, second

ONE = np.float32(1)


@inlined
def _inverse_rms(x_W, eps):
    total = np.float32(0)
    for i in range(x_W.shape[0]):
        a, b = first(x_W[i]), second(x_W[i])
        total += a * a + b * b
    return ONE / np.sqrt(total / np.float32(2 * x_W.shape[0]) + eps)


@kernel()
def rms_norm(word: Any) -> Body:
    """out = x / sqrt(mean(x^2) + eps) * weight, row by row; arguments x [N, W], N, W, weight [W], eps, out [N, W]."""

    def run(data):
        x, num_rows, width, weight, eps, out = carray(data, 6, np.int64)
        x_NW, out_NW = carray(pointer(x), (num_rows, width), word), carray(pointer(out), (num_rows, width), word)
        weight_W = carray(pointer(weight), width, word)
        begin, end = own_share(num_rows)
        for n in range(begin, end):
            scale = _inverse_rms(x_NW[n], first(np.uint64(eps)))
            for i in range(width):
                both, w = x_NW[n, i], weight_W[i]
                out_NW[n, i] = pack(both, first(both) * scale * first(w), second(both) * scale * second(w))

    return run


@kernel()
def layer_norm(word: Any) -> Body:
    """out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias, row by row.

    Arguments x [N, W], N, W, weight [W], bias [W], eps, out [N, W].
    """

    def run(data):
        x, num_rows, width, weight, bias, eps, out = carray(data, 7, np.int64)
        x_NW, out_NW = carray(pointer(x), (num_rows, width), word), carray(pointer(out), (num_rows, width), word)
        weight_W, bias_W = carray(pointer(weight), width, word), carray(pointer(bias), width, word)
        count = np.float32(2 * width)
        begin, end = own_share(num_rows)
        for n in range(begin, end):
            total = squares = np.float32(0)
            for i in range(width):
                total += first(x_NW[n, i]) + second(x_NW[n, i])
            mean = total / count
            for i in range(width):
                a, b = first(x_NW[n, i]) - mean, second(x_NW[n, i]) - mean
                squares += a * a + b * b
            scale = ONE / np.sqrt(squares / count + first(np.uint64(eps)))
            for i in range(width):
                both, w, c = x_NW[n, i], weight_W[i], bias_W[i]
                a, b = (first(both) - mean) * scale * first(w), (second(both) - mean) * scale * second(w)
                out_NW[n, i] = pack(both, a + first(c), b + second(c))

    return run


@kernel(exact=True)
def normalise(word: Any) -> Body:
    """out = (x - mean) / std of bytes, channel by channel, every operation rounded as it is written.

    Arguments x uint8 [N, C, 2 W], N, C, W, mean float32 [C], std float32 [C], out [N, C, W].
    """

    def run(data):
        x, num_rows, num_channels, width, mean, std, out = carray(data, 7, np.int64)
        x_NCV = carray(pointer(x), (num_rows, num_channels, 2 * width), np.uint8)
        out_NCW = carray(pointer(out), (num_rows, num_channels, width), word)
        mean_C, std_C = carray(pointer(mean), num_channels, np.float32), carray(pointer(std), num_channels, np.float32)
        begin, end = own_share(num_rows)
        for n in range(begin, end):
            for c in range(num_channels):
                centre, spread = mean_C[c], std_C[c]
                for i in range(width):
                    a, b = np.float32(x_NCV[n, c, 2 * i]), np.float32(x_NCV[n, c, 2 * i + 1])
                    out_NCW[n, c, i] = pack(out_NCW[n, c, i], (a - centre) / spread, (b - centre) / spread)

    return run


@inlined
def _norm_rotate(x_W, weight_W, eps, cos_W, sin_W, out_W):
    scale, half = _inverse_rms(x_W, eps), x_W.shape[0] // 2
    for i in range(half):
        j = i + half
        a, b = first(x_W[i]) * scale * first(weight_W[i]), first(x_W[j]) * scale * first(weight_W[j])
        c, d = second(x_W[i]) * scale * second(weight_W[i]), second(x_W[j]) * scale * second(weight_W[j])
        cos, sin = cos_W[i], sin_W[i]
        out_W[i] = pack(cos, a * first(cos) + b * first(sin), c * second(cos) + d * second(sin))
        cos, sin = cos_W[j], sin_W[j]
        out_W[j] = pack(cos, b * first(cos) + a * first(sin), d * second(cos) + c * second(sin))


@kernel()
def norm_rotate(word: Any) -> Body:
    """Norm the first M = Q + K heads of each row, and turn channels i and i + W: out = x * cos + swapped x * sin.

    Arguments x [N, H, W], N, H, W, weight [M, W], eps, cos [N, W], sin [N, W], q [N, Q, W], Q, k [N, K, W], K. Half of
    the sine is negated, as saccade.nn.rope.rotation gives it.
    """

    def run(data):
        x, num_rows, num_heads, width, weight, eps, cos, sin, q, num_q, k, num_k = carray(data, 12, np.int64)
        x_NHW = carray(pointer(x), (num_rows, num_heads, width), word)
        weight_MW = carray(pointer(weight), (num_q + num_k, width), word)
        cos_NW, sin_NW = carray(pointer(cos), (num_rows, width), word), carray(pointer(sin), (num_rows, width), word)
        q_NQW = carray(pointer(q), (num_rows, num_q, width), word)
        k_NKW = carray(pointer(k), (num_rows, num_k, width), word)
        begin, end = own_share(num_rows)
        for n in range(begin, end):
            for m in range(num_q + num_k):
                out_W = q_NQW[n, m] if m < num_q else k_NKW[n, m - num_q]
                _norm_rotate(x_NHW[n, m], weight_MW[m], first(np.uint64(eps)), cos_NW[n], sin_NW[n], out_W)

    return run


@inlined
def _rotate_pairs(x_W, turn_W, out_W):
    for i in range(x_W.shape[0]):
        a, b, cos, sin = first(x_W[i]), second(x_W[i]), first(turn_W[i]), second(turn_W[i])
        out_W[i] = pack(x_W[i], a * cos - b * sin, a * sin + b * cos)


@kernel()
def rotate_pairs(word: Any) -> Body:
    """Turn the first 2 Q heads of each row: a word is a complex number, and so is its turn, always of two float32.

    Arguments x [N, H, W], N, H, W, turn complex64 [N, W], q [N, Q, W], k [N, Q, W], Q.
    """

    def run(data):
        x, num_rows, num_heads, width, turn, q, k, num_q = carray(data, 8, np.int64)
        x_NHW = carray(pointer(x), (num_rows, num_heads, width), word)
        turn_NW = carray(pointer(turn), (num_rows, width), np.uint64)
        q_NQW = carray(pointer(q), (num_rows, num_q, width), word)
        k_NQW = carray(pointer(k), (num_rows, num_q, width), word)
        begin, end = own_share(num_rows)
        for n in range(begin, end):
            for h in range(2 * num_q):
                _rotate_pairs(x_NHW[n, h], turn_NW[n], q_NQW[n, h] if h < num_q else k_NQW[n, h - num_q])

    return run


@inlined
def _silu(x):
    power = exponential(-abs(x))
    return x * (ONE if x >= 0 else power) / (ONE + power)


@kernel()
def gate(word: Any) -> Body:
    """out = silu(gate) * up of rows that hold W gates and then as many ups; arguments x [N, 2 W], N, W, out [N, W]."""

    def run(data):
        x, num_rows, width, out = carray(data, 4, np.int64)
        x_NV, out_NW = carray(pointer(x), (num_rows, 2 * width), word), carray(pointer(out), (num_rows, width), word)
        begin, end = own_share(num_rows)
        for n in range(begin, end):
            for i in range(width):
                g, up = x_NV[n, i], x_NV[n, i + width]
                out_NW[n, i] = pack(g, _silu(first(g)) * first(up), _silu(second(g)) * second(up))

    return run

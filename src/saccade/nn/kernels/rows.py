"""Norms, rotary positions and the gate of an MLP, each in one pass over its rows.

Arrays are of words (saccade.nn.kernels.words): x [N, W] is N rows of 2 W values. All is computed in float32 and rounded
once.
"""

import numpy as np

from saccade.nn.kernels.compiled import compiled, exact, inlined
from saccade.nn.kernels.exponential import exponential
from saccade.nn.kernels.words import first, pack, second

ONE = np.float32(1)


@inlined
def _inverse_rms(x_W, eps):
    total = np.float32(0)
    for i in range(x_W.shape[0]):
        a, b = first(x_W[i]), second(x_W[i])
        total += a * a + b * b
    return ONE / np.sqrt(total / np.float32(2 * x_W.shape[0]) + eps)


@compiled
def rms_norm(x_NW, weight_W, eps, out_NW):
    """out = x / sqrt(mean(x^2) + eps) * weight, row by row."""
    for n in range(x_NW.shape[0]):
        scale = _inverse_rms(x_NW[n], eps)
        for i in range(x_NW.shape[1]):
            x, w = x_NW[n, i], weight_W[i]
            out_NW[n, i] = pack(x, first(x) * scale * first(w), second(x) * scale * second(w))


@compiled
def layer_norm(x_NW, weight_W, bias_W, eps, out_NW):
    """out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias, row by row."""
    width = x_NW.shape[1]
    count = np.float32(2 * width)
    for n in range(x_NW.shape[0]):
        total = squares = np.float32(0)
        for i in range(width):
            total += first(x_NW[n, i]) + second(x_NW[n, i])
        mean = total / count
        for i in range(width):
            a, b = first(x_NW[n, i]) - mean, second(x_NW[n, i]) - mean
            squares += a * a + b * b
        scale = ONE / np.sqrt(squares / count + eps)
        for i in range(width):
            x, w, c = x_NW[n, i], weight_W[i], bias_W[i]
            a, b = (first(x) - mean) * scale * first(w), (second(x) - mean) * scale * second(w)
            out_NW[n, i] = pack(x, a + first(c), b + second(c))


@exact
def normalise(x_NCV, mean_C, std_C, out_NCW):
    """out = (x - mean) / std of bytes, channel by channel: V = 2 W."""
    for n in range(x_NCV.shape[0]):
        for c in range(x_NCV.shape[1]):
            mean, std = mean_C[c], std_C[c]
            for i in range(out_NCW.shape[2]):
                a, b = np.float32(x_NCV[n, c, 2 * i]), np.float32(x_NCV[n, c, 2 * i + 1])
                out_NCW[n, c, i] = pack(out_NCW[n, c, i], (a - mean) / std, (b - mean) / std)


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


@compiled
def norm_rotate(x_NHW, weight_MW, eps, cos_NW, sin_NW, q_NQW, k_NKW):
    """Norm the first M = Q + K heads of each row, and turn channels i and i + W: out = x * cos + swapped x * sin.

    Half of the sine is negated, as saccade.nn.rope.rotation gives it.
    """
    num_heads = q_NQW.shape[1]
    for n in range(x_NHW.shape[0]):
        for q in range(num_heads):
            _norm_rotate(x_NHW[n, q], weight_MW[q], eps, cos_NW[n], sin_NW[n], q_NQW[n, q])
        for k in range(k_NKW.shape[1]):
            m = num_heads + k
            _norm_rotate(x_NHW[n, m], weight_MW[m], eps, cos_NW[n], sin_NW[n], k_NKW[n, k])


@inlined
def _rotate_pairs(x_W, cos_W, sin_W, out_W):
    for i in range(x_W.shape[0]):
        a, b = first(x_W[i]), second(x_W[i])
        out_W[i] = pack(x_W[i], a * cos_W[i] - b * sin_W[i], a * sin_W[i] + b * cos_W[i])


@compiled
def rotate_pairs(x_NHW, cos_NW, sin_NW, q_NQW, k_NQW):
    """Turn the first 2 Q heads of each row: a word is a complex number, multiplied by (cos, sin) in float32."""
    num_heads = q_NQW.shape[1]
    for n in range(x_NHW.shape[0]):
        for q in range(num_heads):
            _rotate_pairs(x_NHW[n, q], cos_NW[n], sin_NW[n], q_NQW[n, q])
        for k in range(num_heads):
            _rotate_pairs(x_NHW[n, num_heads + k], cos_NW[n], sin_NW[n], k_NQW[n, k])


@inlined
def _silu(x):
    power = exponential(-abs(x))
    return x * (ONE if x >= 0 else power) / (ONE + power)


@compiled
def gate(x_NW, out_NV):
    """out = silu(gate) * up of rows that hold the gates and then as many ups: W = 2 V."""
    half = out_NV.shape[1]
    for n in range(x_NW.shape[0]):
        for i in range(half):
            g, up = x_NW[n, i], x_NW[n, i + half]
            out_NV[n, i] = pack(g, _silu(first(g)) * first(up), _silu(second(g)) * second(up))

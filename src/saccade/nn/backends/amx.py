"""In bfloat16 on a CPU with AMX: linear layers, and the attention of prompts and pictures, by kernels of our own too.

Torch's own attention multiplies by AMX as well, but passes over the scores several times between its two products.
"""

from collections.abc import Callable
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch

from saccade.nn.activation import GELU, GELU_TANH, IDENTITY, SILU, Activation
from saccade.nn.backends import numba_cpu
from saccade.nn.backends.numba_cpu import slices
from saccade.nn.context import PackedLayout, Product
from saccade.nn.kernels import tile_product
from saccade.nn.kernels.tile_attention import attend
from saccade.nn.kernels.words import words

PART_SCORES, PART_PRODUCTS = 1 << 19, 1 << 25
"""Scores, and multiply-adds of a linear layer, that are worth a thread."""


class Frame(NamedTuple):
    """Tokens that attend to nothing but one another; query n sees the keys up to n + *offset*."""

    queries: slice
    keys: slice
    offset: int


KINDS = MappingProxyType(
    {
        IDENTITY: tile_product.NONE,
        GELU: tile_product.GELU,
        GELU_TANH: tile_product.GELU_TANH,
        SILU: tile_product.SILU,
    }
)

Share = Callable[[Callable[[slice], None], list[slice]], None]


class TileProduct:
    """nn.context.Product of widths of whole tiles."""

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, share: Share) -> None:
        """*share* runs a function on parts."""
        self._tiles = tile_product.lay_out(words(weight_OI.data))
        bias = weight_OI.new_zeros(weight_OI.shape[0]) if bias_O is None else bias_O
        self._bias = tile_product.lay_out_bias(bias.float().numpy())
        self._addresses = self._tiles.ctypes.data, self._bias.ctypes.data
        self._num_outputs, self._num_inputs = weight_OI.shape
        self._share = share

    def apply(self, x_NI: torch.Tensor, activation: Activation) -> torch.Tensor:
        """In one pass."""
        return self._multiply(x_NI, KINDS[activation], None)

    def add_to(self, residual_NO: torch.Tensor, x_NI: torch.Tensor) -> torch.Tensor:
        """In one pass."""
        return self._multiply(x_NI, tile_product.NONE, residual_NO.contiguous())

    def _multiply(self, x_NI: torch.Tensor, kind: int, residual_NO: torch.Tensor | None) -> torch.Tensor:
        x_NI = x_NI.contiguous()
        num_rows = x_NI.shape[0]
        output_NO = x_NI.new_empty(num_rows, self._num_outputs)
        x, out = x_NI.data_ptr(), output_NO.data_ptr()
        residual = 0 if residual_NO is None else residual_NO.data_ptr()
        kernel, shape = tile_product.multiply(), self._tiles.shape[:2]

        def run(part: slice) -> None:
            before, count = part.start or 0, min(part.stop, num_rows) - (part.start or 0)
            place = 2 * before * self._num_outputs
            added = residual and residual + place
            kernel(x + 2 * before * self._num_inputs, count, shape, *self._addresses, kind, added, out + place)

        count = min(torch.get_num_threads(), num_rows * self._num_inputs * self._num_outputs // PART_PRODUCTS)
        self._share(run, slices(num_rows, count, tile_product.BLOCK))
        return output_NO


class Backend(numba_cpu.Backend):
    """nn.context.Backend for bfloat16 where kernels.tiles.available()."""

    def product(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> Product | None:
        """By a kernel of our own where widths are of whole tiles."""
        if any(size % tile_product.BLOCK for size in weight_OI.shape):
            return super().product(weight_OI, bias_O)
        return TileProduct(weight_OI, bias_O, self._share)

    def prefill(
        self, q_NQD: torch.Tensor, k_LKD: torch.Tensor, v_LKD: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Attend without the mask: the kernel knows which keys a token may see."""
        frame = Frame(slice(None), slice(None), k_LKD.shape[0] - q_NQD.shape[0])
        return self._attend(q_NQD, k_LKD, v_LKD, [frame])

    def packed(
        self, q_NQD: torch.Tensor, k_NQD: torch.Tensor, v_NQD: torch.Tensor, layout: PackedLayout
    ) -> torch.Tensor:
        """Attend within each frame, where everybody sees everybody."""
        frames, start = [], 0
        for length in layout.sequence_lengths:
            tokens = slice(start, start + length)
            frames.append(Frame(tokens, tokens, length))
            start += length
        return self._attend(q_NQD, k_NQD, v_NQD, frames)

    def _attend(
        self, q_NQD: torch.Tensor, k_LKD: torch.Tensor, v_LKD: torch.Tensor, frames: list[Frame]
    ) -> torch.Tensor:
        """Share the key/value heads out to torch's threads."""
        output = q_NQD.new_empty(q_NQD.shape)
        q, k, v, out = (words(tensor) for tensor in (q_NQD, k_LKD, v_LKD, output))
        scale, num_kv_heads = np.float32(q_NQD.shape[2] ** -0.5), k.shape[1]

        def run(heads: tuple[int, int]) -> None:
            for queries, keys, offset in frames:
                attend(q[queries], k[keys], v[keys], scale, offset, heads, out[queries])

        num_scores = q.shape[1] * sum(len(q[frame.queries]) * len(k[frame.keys]) for frame in frames)
        count = max(1, min(torch.get_num_threads(), num_scores // PART_SCORES, num_kv_heads))
        borders = [num_kv_heads * part // count for part in range(count + 1)]
        self._share(run, list(pairwise(borders)))
        return output.flatten(1)

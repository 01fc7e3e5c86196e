"""In bfloat16 on a CPU with AMX: linear layers, and the attention of prompts and pictures, by kernels of our own too.

Torch's own attention multiplies by AMX as well, but passes over the scores several times between its two products.
"""

from types import MappingProxyType

import torch

from saccade.nn.activation import GELU, GELU_TANH, IDENTITY, SILU, Activation
from saccade.nn.backends import numba_cpu
from saccade.nn.context import PackedLayout, Product
from saccade.nn.kernels import tile_product
from saccade.nn.kernels.tile_attention import attend
from saccade.nn.kernels.words import words

PART_SCORES, PART_PRODUCTS, PART_WEIGHTS = 1 << 18, 1 << 23, 1 << 19
"""Scores, multiply-adds of a linear layer, and weights to be read for it, that are worth a thread."""


KINDS = MappingProxyType(
    {
        IDENTITY: tile_product.NONE,
        GELU: tile_product.GELU,
        GELU_TANH: tile_product.GELU_TANH,
        SILU: tile_product.SILU,
    }
)


class TileProduct:
    """nn.context.Product of widths of whole tiles."""

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        """Lay it out as tiles."""
        self._tiles = tile_product.lay_out(words(weight_OI.data))
        bias = weight_OI.new_zeros(weight_OI.shape[0]) if bias_O is None else bias_O
        self._bias = tile_product.lay_out_bias(bias.float().numpy())
        self._layer = (*self._tiles.shape[:2], self._tiles.ctypes.data, self._bias.ctypes.data)
        self._room_bytes = tile_product.room_bytes(self._tiles.shape[1])
        self._num_outputs, self._num_weights = len(weight_OI), weight_OI.numel()

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
        residual = 0 if residual_NO is None else residual_NO.data_ptr()
        arguments = (x_NI.data_ptr(), num_rows, *self._layer, kind, residual, output_NO.data_ptr())
        worth = max(num_rows * self._num_weights // PART_PRODUCTS, self._num_weights // PART_WEIGHTS)
        tile_product.multiply()(arguments, min(torch.get_num_threads(), worth), self._room_bytes)
        return output_NO


class Backend(numba_cpu.Backend):
    """nn.context.Backend for bfloat16 where kernels.tiles.available()."""

    def product(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> Product | None:
        """By a kernel of our own where widths are of whole tiles."""
        if any(size % tile_product.BLOCK for size in weight_OI.shape):
            return super().product(weight_OI, bias_O)
        return TileProduct(weight_OI, bias_O)

    def prefill(
        self, q_NQD: torch.Tensor, k_LKD: torch.Tensor, v_LKD: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Attend without the mask: the kernel knows which keys a token may see."""
        output_NQD = torch.empty_like(q_NQD, memory_format=torch.contiguous_format)
        _attend(q_NQD, k_LKD, v_LKD, k_LKD.shape[0] - q_NQD.shape[0], output_NQD)
        return output_NQD.flatten(1)

    def packed(
        self, q_NQD: torch.Tensor, k_NQD: torch.Tensor, v_NQD: torch.Tensor, layout: PackedLayout
    ) -> torch.Tensor:
        """Attend within each frame, where everybody sees everybody."""
        output_NQD = torch.empty_like(q_NQD, memory_format=torch.contiguous_format)
        frames = (tensor.split(layout.sequence_lengths) for tensor in (q_NQD, k_NQD, v_NQD, output_NQD))
        for q_LQD, k_LQD, v_LQD, output_LQD in zip(*frames, strict=True):
            _attend(q_LQD, k_LQD, v_LQD, len(k_LQD), output_LQD)
        return output_NQD.flatten(1)


def _attend(q_NQD: torch.Tensor, k_LKD: torch.Tensor, v_LKD: torch.Tensor, offset: int, out_NQD: torch.Tensor) -> None:
    """Share it out to torch's threads where it is worth one; query n sees the keys up to n + *offset*."""
    worth = q_NQD.shape[1] * len(q_NQD) * len(k_LKD) // PART_SCORES
    # The kernel takes gaps between tokens, not between heads.
    q, k, v = (x if x.stride(1) == x.shape[2] else x.contiguous() for x in (q_NQD, k_LKD, v_LKD))
    attend(q, k, v, offset, out_NQD, min(torch.get_num_threads(), worth))

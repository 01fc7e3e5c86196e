"""Products of int8 weights and int8 activations on a CPU by oneDNN.

Weights have a scale for each row. Activations are rounded token by token, so that no other token of the batch changes a
token's result; a token's largest value becomes 127. The product is computed in whole numbers, so it is exact. oneDNN
gets unsigned activations: for signed ones, processors without AMX run oneDNN's reference code, hundreds of times
slower. Shapes: N tokens, I inputs, O outputs.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType

import torch

from saccade.nn.formats.int8 import LARGEST, SCALE, VALUES
from saccade.nn.formats.onednn_packing import packed_weight
from saccade.nn.formats.quantised import QuantisedLinear, QuantisedWeight, stacked
from saccade.nn.libraries import Unavailable
from saccade.nn.onednn_memory import PackedMemory, possible_memory
from saccade.nn.ops import GELU_TANH, Activation, PackedLinear

ZERO, HALF_ZERO = 128, 64
"""What stands for zero in unsigned activations, and in their halves."""

MOST_COLUMNS = (1 << 31) // (255 * 128)
"""Of more columns, a sum could exceed 32 bits."""

SMALLEST = torch.finfo(torch.float32).tiny * LARGEST
"""A token of zeros is rounded as if this were its largest value."""

ROWS = 128
"""How many tokens are rounded or scaled at a time: their float32 copies fit into the processor's cache."""


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """Return x / 2 * (1 + tanh(z)) for z = sqrt(2 / pi) * (x + 0.044715 x^3), as x * sigmoid(2 z).

    In float32, it takes half the time of PyTorch's function, which computes tanh. Source: Hendrycks & Gimpel 2016,
    arXiv:1606.08415.
    """
    twice = 2 * math.sqrt(2 / math.pi)
    return (x * x).mul_(0.044715 * twice).add_(twice).mul_(x).sigmoid_().mul_(x)


FASTER: Mapping[Activation, Activation] = MappingProxyType({GELU_TANH: gelu_tanh})
"""What takes the place of an activation in float32."""


@dataclass(frozen=True)
class Int8Product(PackedLinear):
    """An int8 linear layer: *packed* is in oneDNN's layout, with float32 *scales_O*, and zero points *zeros_O* int32.

    With *by_halves*, activations are multiplied in two parts of at most seven bits, for processors without VNNI.
    """

    packed: torch.Tensor
    scales_O: torch.Tensor
    zeros_O: torch.Tensor
    bias_O: torch.Tensor | None
    by_halves: bool

    def apply(self, x_NI: torch.Tensor, activation: Activation | None) -> torch.Tensor:
        """Return activation(x W^T + b) [N, O]."""
        return self._scaled(x_NI, activation, None)

    def add_to(self, residual_NO: torch.Tensor, x_NI: torch.Tensor) -> torch.Tensor:
        """Return residual + x W^T + b [N, O], rounded once."""
        return self._scaled(x_NI, None, residual_NO)

    def possible_rows(self, shape: tuple[int, int]) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """See PackedLinear.possible_rows."""
        return (partial(self._rows, memory) for memory in possible_memory(self.packed, shape, torch.int8))

    def _rows(self, memory: PackedMemory, ids_N: torch.Tensor) -> torch.Tensor:
        """Return the float32 weights [N, I] of some outputs."""
        return memory.rows(ids_N) * self.scales_O.index_select(0, ids_N).unsqueeze(1)

    def _scaled(
        self, x_NI: torch.Tensor, activation: Activation | None, residual_NO: torch.Tensor | None
    ) -> torch.Tensor:
        """Return residual + activation(x W^T + b) [N, O], computed in float32 and rounded once."""
        product_NO, scales_N1 = self._product(x_NI)
        if len(x_NI) <= ROWS:
            return self._finished(product_NO, scales_N1, activation, residual_NO).to(x_NI.dtype)
        output_NO = x_NI.new_empty(0)
        for start in range(0, len(x_NI), ROWS):
            some = slice(start, start + ROWS)
            residual = None if residual_NO is None else residual_NO[some]
            result = self._finished(product_NO[some], scales_N1[some], activation, residual)
            if start == 0:
                # An activation may have fewer outputs than the product.
                output_NO = x_NI.new_empty(len(x_NI), result.shape[1])
            output_NO[some] = result
        return output_NO

    def _finished(
        self,
        product_NO: torch.Tensor,
        scales_N1: torch.Tensor,
        activation: Activation | None,
        residual_NO: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the float32 result of a product of whole numbers, which it overwrites."""
        # A bias or an activation before the token's scale would be wrong: oneDNN cannot fuse them.
        product_NO.mul_(scales_N1)
        if self.bias_O is not None:
            product_NO.add_(self.bias_O)
        output_NO = product_NO if activation is None else FASTER.get(activation, activation)(product_NO)
        return output_NO if residual_NO is None else output_NO.add_(residual_NO)

    def _product(self, x_NI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the float32 product [N, O] of *x_NI* divided by its tokens' scales, and these scales [N, 1]."""
        codes_NI, scales_N1 = rounded_tokens(x_NI)
        if not self.by_halves:
            return self._sums(codes_NI, ZERO), scales_N1
        # Each part stands for zero by the same number, so that one call multiplies both: 2 * upper + lower.
        parts = torch.cat((codes_NI >> 1, (codes_NI & 1) + HALF_ZERO))
        upper_NO, lower_NO = self._sums(parts, HALF_ZERO).chunk(2)
        return torch.add(lower_NO, upper_NO, alpha=2), scales_N1

    def _sums(self, codes_NI: torch.Tensor, zero: int) -> torch.Tensor:
        return torch.ops.onednn.qlinear_pointwise(  # type: ignore[no-any-return]
            codes_NI, 1.0, zero, self.packed, self.scales_O, self.zeros_O, None, 1.0, 0, torch.float32, "none", [], ""
        )


def rounded_tokens(x_NI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return uint8 codes [N, I] from 1 to 255, with 128 for zero, and the float32 scale [N, 1] of each token."""
    if len(x_NI) <= ROWS:
        return _rounded(x_NI)
    codes_NI, scales_N1 = torch.empty(x_NI.shape, dtype=torch.uint8), torch.empty(len(x_NI), 1)
    for start in range(0, len(x_NI), ROWS):
        some = slice(start, start + ROWS)
        codes_NI[some], scales_N1[some] = _rounded(x_NI[some])
    return codes_NI, scales_N1


def _rounded(x_NI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values_NI = x_NI.float()
    sizes_NI = values_NI.abs()
    scales_N1 = sizes_NI.amax(1, keepdim=True).clamp_min_(SMALLEST).div_(LARGEST)
    signed_NI = torch.mul(values_NI, scales_N1.reciprocal(), out=sizes_NI).round_().to(torch.int8)
    # PyTorch's cast to uint8 takes five times as long, so the other sign bit makes the codes unsigned.
    return signed_NI.view(torch.uint8).bitwise_xor_(ZERO), scales_N1


def pack_linear(layer: QuantisedLinear) -> Int8Product:
    """Return the product for *layer*, whose parts are all of the kind int8. Raises Unavailable."""
    rows = [_rows_of(part) for part in layer.parts if isinstance(part, QuantisedWeight)]
    values_OI = stacked([values for values, _ in rows])
    if values_OI.shape[1] > MOST_COLUMNS:
        raise Unavailable(f"sums of more than {MOST_COLUMNS} columns may exceed 32 bits")
    packed = packed_weight(values_OI)
    scales_O = torch.cat([scales for _, scales in rows])
    zeros_O = torch.zeros(len(scales_O), dtype=torch.int32)
    return Int8Product(packed, scales_O, zeros_O, layer.bias_O, saturates())


def _rows_of(weight: QuantisedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 values [O, I] and float32 scales [O]."""
    return weight.fields[VALUES], weight.fields[SCALE].float().flatten().expand(weight.region.num_rows)


@cache
def saturates() -> bool:
    """Return whether this processor adds pairs of products in 16 bits, which the largest ones exceed.

    AVX2, and AVX512 without VNNI, do this.
    """
    values = torch.full((16, 64), LARGEST, dtype=torch.int8)
    probe = Int8Product(
        torch.ops.onednn.qlinear_prepack(values, None), torch.ones(16), torch.zeros(16, dtype=torch.int32), None, False
    )
    largest = torch.full((1, 64), float(LARGEST))
    return bool((probe.apply(largest, None) != 64 * LARGEST * LARGEST).any())

"""Products of int8 weights and int8 activations on a CPU by oneDNN.

Weights have a scale for each row. Activations are rounded token by token, so that no other token of the batch changes a
token's result; a token's largest value becomes 127. The product is computed in whole numbers, so it is exact. oneDNN
gets unsigned activations: for signed ones, processors without AMX run oneDNN's reference code, hundreds of times
slower. Shapes: N tokens, I inputs, O outputs.
"""

from dataclasses import dataclass
from functools import cache

import torch

from saccade.nn.formats.int8 import LARGEST, SCALE, VALUES, Int8
from saccade.nn.formats.packed_ints import PackedInts
from saccade.nn.formats.quantised import QuantisedLinear, QuantisedWeight
from saccade.nn.libraries import Unavailable
from saccade.nn.ops import Activation, PackedLinear

ZERO, HALF_ZERO = 128, 64
"""What stands for zero in unsigned activations, and in their halves."""

MOST_COLUMNS = (1 << 31) // (255 * 128)
"""Of more columns, a sum could exceed 32 bits."""

ROWS = 128
"""How many tokens are rounded or scaled at a time: their float32 copies fit into the processor's cache."""


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
        product_NO, scales_N1 = self._product(x_NI)
        output_NO = product_NO if x_NI.dtype == product_NO.dtype else torch.empty_like(product_NO, dtype=x_NI.dtype)
        for product, scales, output in zip(*(t.split(ROWS) for t in (product_NO, scales_N1, output_NO)), strict=True):
            # A bias or an activation before the token's scale would be wrong: oneDNN cannot fuse them.
            product.mul_(scales)
            if self.bias_O is not None:
                product.add_(self.bias_O)
            output.copy_(product if activation is None else activation(product))
        return output_NO

    def add_to(self, residual_NO: torch.Tensor, x_NI: torch.Tensor) -> torch.Tensor:
        """Return residual + x W^T + b [N, O], rounded once."""
        product_NO, scales_N1 = self._product(x_NI)
        output_NO = torch.empty_like(residual_NO)
        for product, scales, residual, output in zip(
            *(t.split(ROWS) for t in (product_NO, scales_N1, residual_NO, output_NO)), strict=True
        ):
            product.mul_(scales)
            if self.bias_O is not None:
                product.add_(self.bias_O)
            torch.add(product, residual, out=output)
        return output_NO

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
    codes_NI = torch.empty(x_NI.shape, dtype=torch.uint8)
    scales_N1 = torch.empty(len(x_NI), 1)
    smallest = torch.finfo(torch.float32).tiny * LARGEST
    for x, codes, scales in zip(*(t.split(ROWS) for t in (x_NI, codes_NI, scales_N1)), strict=True):
        largest = x.abs().amax(1, keepdim=True).float().clamp_min_(smallest)
        torch.div(largest, LARGEST, out=scales)
        # The cast cuts off the fraction.
        codes.copy_((x * (LARGEST / largest)).add_(ZERO + 0.5))
    return codes_NI, scales_N1


def pack_linear(layer: QuantisedLinear) -> Int8Product:
    """Return the product for *layer*, whose parts are all of the kind int8. Raises Unavailable."""
    rows = [_rows_of(part) for part in layer.parts if isinstance(part, QuantisedWeight)]
    values_OI = torch.cat([values for values, _ in rows])
    if values_OI.shape[1] > MOST_COLUMNS:
        raise Unavailable(f"sums of more than {MOST_COLUMNS} columns may exceed 32 bits")
    packed = torch.ops.onednn.qlinear_prepack(values_OI, None)
    scales_O = torch.cat([scales for _, scales in rows])
    zeros_O = torch.zeros(len(scales_O), dtype=torch.int32)
    return Int8Product(packed, scales_O, zeros_O, layer.bias_O, saturates())


def _rows_of(weight: QuantisedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 values [O, I] and float32 scales [O]. Raises Unavailable."""
    form, num_rows = weight.format, weight.region.num_rows
    if isinstance(form, Int8):
        return weight.fields[VALUES], weight.fields[SCALE].float().flatten().expand(num_rows)
    if not isinstance(form, PackedInts):
        raise TypeError(f"{form.name} has no bytes.")
    codes_OI, scales_OG, zeros_OG = form.codes(weight.fields, weight.region)
    if scales_OG.shape[1] != 1:
        raise Unavailable(f"the kernel for int8 takes one scale a row, not groups of {form.group_size} columns")
    if not (zeros_OG == ZERO).all():
        raise Unavailable("the kernel for int8 takes no zero points")
    return codes_OI.sub_(ZERO).to(torch.int8), scales_OG.flatten()


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

"""Products with quantised weights on a GPU by PyTorch itself: FP8 with a scale for each row, and INT4 in groups.

`_scaled_mm` takes weights and activations in e4m3, each row with its scale. `_weight_int4pack_mm` takes bfloat16
activations and weights (code - 8) * scale + zero; scales and zeros are bfloat16. Shapes: N tokens, I inputs, O outputs,
G groups of columns.
"""

from dataclasses import dataclass

import torch

from saccade.nn.formats.fp8 import Fp8
from saccade.nn.formats.packed_ints import PackedInts
from saccade.nn.formats.products import Product, aligned, capability, field_of, rounded_to_fp8
from saccade.nn.formats.quantised import QuantisedLinear, QuantisedWeight
from saccade.nn.libraries import Unavailable

FP8_CAPABILITY, INT4_CAPABILITY = (8, 9), (8, 0)
FP8_ALIGNMENT = 16
INNER_TILES, INT4_ROWS, INT4_COLUMNS = 8, 8, 128
GROUP_SIZES = (32, 64, 128, 256)
MIDDLE = 8
"""The code that `_weight_int4pack_mm` takes for zero."""


@dataclass(frozen=True)
class RowFp8(Product):
    """An FP8 linear layer: *weight_OI* is e4m3, with one float32 scale per row in *scales_1O*.

    Activations are rounded to e4m3 token by token.
    """

    weight_OI: torch.Tensor
    scales_1O: torch.Tensor
    bias_O: torch.Tensor | None

    def product(self, x_NI: torch.Tensor) -> torch.Tensor:
        """Return x W^T [N, O]."""
        values, scales_N1 = rounded_to_fp8(x_NI, x_NI.shape[1])
        return torch._scaled_mm(
            values, self.weight_OI.t(), scale_a=scales_N1, scale_b=self.scales_1O, out_dtype=x_NI.dtype
        )


@dataclass(frozen=True)
class Int4(Product):
    """An INT4 linear layer: *packed* int32 is in PyTorch's layout, with bfloat16 *scales_and_zeros_GO2*."""

    packed: torch.Tensor
    scales_and_zeros_GO2: torch.Tensor
    group_size: int
    bias_O: torch.Tensor | None

    def product(self, x_NI: torch.Tensor) -> torch.Tensor:
        """Return x W^T [N, O]."""
        return torch._weight_int4pack_mm(x_NI, self.packed, self.group_size, self.scales_and_zeros_GO2)


def pack_linear(layer: QuantisedLinear) -> Product:
    """Return the product for *layer*, whose parts all have one format. Raises Unavailable."""
    weights = aligned(layer.parts, 1, 1)
    return _rows_of(weights, layer.bias_O) if isinstance(weights[0].format, Fp8) else _int4(weights, layer.bias_O)


def _rows_of(weights: list[QuantisedWeight], bias_O: torch.Tensor | None) -> RowFp8:
    values = field_of(weights, "weight")
    if capability(values) < FP8_CAPABILITY:
        raise Unavailable("FP8 needs a GPU of compute capability 8.9 or more")
    if any(size % FP8_ALIGNMENT for size in values.shape):
        raise Unavailable(f"its sides are no multiples of {FP8_ALIGNMENT}")
    scales = [
        weight.fields[weight.format.scale].float().flatten().expand(weight.region.num_rows)
        for weight in weights
        if isinstance(weight.format, Fp8)
    ]
    return RowFp8(values, torch.cat(scales).unsqueeze(0), bias_O)


def _int4(weights: list[QuantisedWeight], bias_O: torch.Tensor | None) -> Int4:
    codes, scales_and_zeros, size = [], [], 0
    for weight in weights:
        if not isinstance(weight.format, PackedInts):
            raise TypeError(f"{weight.format.name} has no packed integers.")
        size = min(weight.format.group_size, weight.region.num_columns)
        if size not in GROUP_SIZES or sum(one.region.num_rows for one in weights) % INT4_ROWS:
            raise Unavailable(f"groups of {size} columns, or its number of rows, fit no tile")
        aligned([weight], 1, max(size, INT4_COLUMNS))
        if capability(weight.fields[weight.format.values]) < INT4_CAPABILITY:
            raise Unavailable("INT4 needs a GPU of compute capability 8.0 or more")
        codes_OI, scales_OG, zeros_OG = weight.format.codes(weight.fields, weight.region)
        codes.append(codes_OI)
        scales_and_zeros.append(torch.stack((scales_OG.t(), ((MIDDLE - zeros_OG) * scales_OG).t()), -1))
    # Two columns a byte, the first in the upper bits.
    upper, lower = torch.cat(codes).unflatten(1, (-1, 2)).unbind(-1)
    packed = torch._convert_weight_to_int4pack(upper << 4 | lower, INNER_TILES)
    return Int4(packed, torch.cat(scales_and_zeros, 1).to(torch.bfloat16), size, bias_O)

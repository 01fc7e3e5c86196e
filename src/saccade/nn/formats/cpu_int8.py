"""Products with int8 weights that leave the activations as they are (W8A16), on a CPU.

`_weight_int8pack_mm` multiplies a few tokens: it reads half of a bfloat16 weight's bytes, and sums in float32. For many
tokens it is slower than oneDNN; some rows of the weight are then unpacked at a time. Shapes: N tokens, I inputs, O
outputs.
"""

from dataclasses import dataclass

import torch

from saccade.nn.formats.packed_ints import PackedInts
from saccade.nn.formats.products import Product
from saccade.nn.formats.quantised import QuantisedLinear, QuantisedWeight, stacked
from saccade.nn.libraries import Unavailable

ZERO = 128
"""The code that stands for zero."""

CROSSING = 16
"""From how many tokens on the weight is unpacked; measured with AVX512, in bfloat16."""

OUTPUTS_AT_ONCE = 512
"""How many outputs are unpacked at a time: their copies fit into the processor's cache, or nearly."""


@dataclass(frozen=True)
class CpuInt8(Product):
    """A linear layer with *values_OI* int8 and float32 *scales_O*, which are rounded to the activations' dtype."""

    values_OI: torch.Tensor
    scales_O: torch.Tensor
    bias_O: torch.Tensor | None

    def product(self, x_NI: torch.Tensor) -> torch.Tensor:
        """Return x W^T [N, O]."""
        if len(x_NI) < CROSSING:
            return torch.ops.aten._weight_int8pack_mm(x_NI, self.values_OI, self.scales_O.to(x_NI.dtype))  # type: ignore[no-any-return]
        output_NO = x_NI.new_empty(len(x_NI), len(self.values_OI))
        for start in range(0, len(self.values_OI), OUTPUTS_AT_ONCE):
            some = slice(start, start + OUTPUTS_AT_ONCE)
            # Whole numbers of eight bits are exact in bfloat16.
            output_NO[:, some] = x_NI @ self.values_OI[some].to(x_NI.dtype).t()
        return output_NO.mul_(self.scales_O)


def pack_linear(layer: QuantisedLinear) -> CpuInt8:
    """Return the product for *layer*, whose parts are all PackedInts of eight bits. Raises Unavailable."""
    rows = [_rows_of(part) for part in layer.parts if isinstance(part, QuantisedWeight)]
    values, scales = zip(*rows, strict=True)
    return CpuInt8(stacked(values), stacked(scales), layer.bias_O)


def _rows_of(weight: QuantisedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 values [O, I] and float32 scales [O]. Raises Unavailable."""
    form = weight.format
    if not isinstance(form, PackedInts):
        raise TypeError(f"{form.name} has no packed integers.")
    region = weight.region
    values_OI = torch.empty(region.num_rows, region.num_columns, dtype=torch.int8)
    scales_O = torch.empty(region.num_rows)
    for start in range(0, region.num_rows, OUTPUTS_AT_ONCE):
        rows = weight.rows(start, min(OUTPUTS_AT_ONCE, region.num_rows - start))
        some = slice(start, start + rows.region.num_rows)
        codes_OI, scales_OG, zeros_OG = form.codes(rows.fields, rows.region)
        if scales_OG.shape[1] != 1:
            raise Unavailable(f"no kernel takes eight bits in groups of {form.group_size} columns")
        if not (zeros_OG == ZERO).all():
            raise Unavailable("no kernel takes eight bits with zero points")
        values_OI[some], scales_O[some] = (codes_OI ^ ZERO).view(torch.int8), scales_OG.flatten()
    return values_OI, scales_O

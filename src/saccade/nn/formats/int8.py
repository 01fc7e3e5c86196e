"""Signed bytes with a scale for each row of a weight, or for the whole weight.

Sources: compressed-tensors, compressors/naive_quantized (IntQuantizationCompressor) and
quantization/lifecycle/forward.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import ClassVar

import torch

from saccade.nn.formats.quantised import WHOLE_ROW, Cell, DerivedValues, QuantisedWeight, Region, WeightField, scaled

FLOATS = ("BF16", "F16", "F32")
LARGEST = 127
"""The largest number that rounding makes: -128 has no opposite."""

ROUNDED_AT_ONCE = 1 << 18
"""Values that are rounded at a time: their copies in float32 fit into the caches of two cores."""

VALUES, SCALE = "weight", "weight_scale"


@dataclass(frozen=True)
class Int8:
    """Stores a byte for each value, and a scale for each *cell*: a whole row, or the whole weight if it is None.

    Activation scales are not needed: each token gets its own when it is multiplied.
    """

    cell: Cell | None = (1, WHOLE_ROW)
    name = "compressed-tensors int-quantized, 8 bits"
    kind = "int8"
    joins_experts = False
    optional = ()
    unused = ("input_scale", "input_zero_point")
    aliases: ClassVar[Mapping[str, str]] = MappingProxyType({})
    derived: ClassVar[Mapping[str, DerivedValues]] = MappingProxyType({})

    @cached_property
    def fields(self) -> Mapping[str, WeightField]:
        """The format's fields: values and scales."""
        return {VALUES: WeightField(("I8",), (1, 1)), SCALE: WeightField(FLOATS, self.cell)}

    def transposed(self) -> None:
        """Return None: transposed weights are not read."""

    def dequantise(self, fields: Mapping[str, torch.Tensor], region: Region) -> torch.Tensor:
        """Return value * scale."""
        values_OI, scales = fields[VALUES].float(), fields[SCALE].float()
        return values_OI * scales if self.cell is None else scaled(values_OI, scales, self.cell, region)


def rounded_rows(weight_OI: torch.Tensor) -> QuantisedWeight:
    """Return *weight_OI* rounded to int8; the largest value of each row becomes 127."""
    rows, columns = weight_OI.shape
    values = torch.empty(rows, columns, dtype=torch.int8, device=weight_OI.device)
    scales = torch.empty(rows, 1, device=weight_OI.device)
    step = max(1, ROUNDED_AT_ONCE // columns)
    in_float = torch.empty(min(step, rows), columns, device=weight_OI.device)
    for some, into, of_rows in zip(weight_OI.split(step), values.split(step), scales.split(step), strict=True):
        block = in_float[: len(some)].copy_(some)
        torch.maximum(block.amax(1, keepdim=True), -block.amin(1, keepdim=True), out=of_rows)
        of_rows.clamp_min_(torch.finfo(torch.float32).tiny * LARGEST).div_(LARGEST)
        into.copy_(block.div_(of_rows).round_())
    return QuantisedWeight(Int8(), {VALUES: values, SCALE: scales}, Region(0, rows, 0, columns))

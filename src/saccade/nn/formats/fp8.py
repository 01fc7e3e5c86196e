"""FP8 (e4m3) with a scale for each block of a weight, for each of its rows, or for the whole weight.

Sources: DeepSeek-V3's release, inference/kernel.py (weight_dequant), which Qwen's FP8 releases follow;
compressed-tensors, quantization/lifecycle/forward.py (dequantize); NVIDIA's Model Optimizer,
modelopt/torch/quantization/qtensor/fp8_tensor.py (FP8QTensor.dequantize).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import ClassVar, Self

import torch
from torch.nn import functional

from saccade.nn.formats.quantised import (
    WHOLE_ROW,
    Cell,
    DerivedValues,
    QuantisedWeight,
    Region,
    WeightField,
    looked_up,
    scaled,
)

FLOATS = ("F32", "BF16", "F16", "F8_E8M0")
BLOCK = 128
LARGEST = 448.0
"""The largest value of e4m3."""

INVERSE, SCALE = "weight_scale_inv", "weight_scale"
"""Names of the factor of dequantisation, in spite of the first, which is that of DeepSeek's format."""


@dataclass(frozen=True)
class Fp8:
    """Stores a byte for each value, and a factor for each *cell* of rows x columns.

    A cell has WHOLE_ROW columns if rows have scales, and is None for a single scale. Blocks at the lower and right
    edges may be smaller. *scale* is the suffix of the scales' names.
    """

    cell: Cell | None = (BLOCK, BLOCK)
    scale: str = INVERSE
    unused = ("input_scale", "activation_scale")
    optional = ()
    joins_experts = True
    derived: ClassVar[Mapping[str, DerivedValues]] = MappingProxyType({})

    @property
    def name(self) -> str:
        """The format's name, with the kind of its cells."""
        kind = "block" if self._has_blocks else "tensor" if self.cell is None else "row"
        return f"fp8 (e4m3 with a scale for each {kind})"

    @property
    def kind(self) -> str:
        """The kind of kernel that takes the format."""
        return "fp8_blocks" if self._has_blocks else "fp8_rows"

    @property
    def aliases(self) -> Mapping[str, str]:
        """The scales' other name, mapped to the usual one."""
        return {name: self.scale for name in (INVERSE, SCALE) if name != self.scale}

    @property
    def _has_blocks(self) -> bool:
        return self.cell is not None and self.cell[1] != WHOLE_ROW

    @cached_property
    def fields(self) -> Mapping[str, WeightField]:
        """The format's fields: values and scales."""
        return {"weight": WeightField(("F8_E4M3",), (1, 1)), self.scale: WeightField(FLOATS, self.cell)}

    def transposed(self) -> Self | None:
        """Return the same format with transposed blocks; None for scales of rows."""
        if self.cell is None:
            return self
        return type(self)(self.cell[::-1], self.scale) if self._has_blocks else None

    def dequantise(self, fields: Mapping[str, torch.Tensor], region: Region) -> torch.Tensor:
        """Return value * scale."""
        codes = fields["weight"].view(torch.uint8)
        values_OI = looked_up(codes, _table(codes.device))
        scales = fields[self.scale].float()
        return values_OI * scales if self.cell is None else scaled(values_OI, scales, self.cell, region)


def rounded(weight: torch.Tensor) -> QuantisedWeight:
    """Round a weight [O, I], or one for each expert [E, O, I], to FP8 blocks: a block's largest value becomes 448."""
    *experts, rows, columns = weight.shape
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(*experts, -(-rows // BLOCK), -(-columns // BLOCK), device=weight.device)
    # One at a time: the copies are in float32.
    for one, into, of_blocks in zip(*(x.view(-1, *x.shape[-2:]) for x in (weight, values, scales)), strict=True):
        padded = functional.pad(one.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
        blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
        of_blocks.copy_(blocks.abs().amax((1, 3)).clamp_min(torch.finfo(torch.float32).tiny * LARGEST) / LARGEST)
        blocks = blocks / of_blocks[:, None, :, None]
        into.copy_(blocks.flatten(2).flatten(0, 1)[:rows, :columns])
    return QuantisedWeight(Fp8(), {"weight": values, INVERSE: scales}, Region(0, rows, 0, columns))


@lru_cache(maxsize=8)
def _table(device: torch.device) -> torch.Tensor:
    """Return the value of every byte, [256]."""
    return torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()

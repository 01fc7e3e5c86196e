"""FP8 (e4m3) with a scale for each block of a weight; blocks at the lower and right edges may be smaller.

Source: DeepSeek-V3's release, inference/kernel.py (weight_dequant), which Qwen's FP8 releases follow.
"""

from collections.abc import Mapping
from functools import cached_property

import torch

from saccade.nn.formats.quantised import Field, Region, scaled


class Fp8Block:
    """A byte a value, and a scale for each *block* of rows x columns, by which it is multiplied."""

    name = "fp8 (e4m3 with block scales)"
    unused = ()

    def __init__(self, block: tuple[int, int] = (128, 128)) -> None:
        self.block = block

    @cached_property
    def fields(self) -> Mapping[str, Field]:
        """Values and scales. In spite of its name, `weight_scale_inv` is the factor of dequantisation."""
        return {
            "weight": Field(("F8_E4M3",), (1, 1)),
            "weight_scale_inv": Field(("F32", "BF16", "F16"), self.block),
        }

    def dequantise(self, fields: Mapping[str, torch.Tensor], region: Region) -> torch.Tensor:
        """Return value * scale."""
        return scaled(fields["weight"].float(), fields["weight_scale_inv"].float(), self.block, region)

"""FP8 (e4m3) with a scale for each block of a weight; blocks at the lower and right edges may be smaller.

Source: DeepSeek-V3's release, inference/kernel.py (weight_dequant), which Qwen's FP8 releases follow.
"""

from collections.abc import Mapping
from functools import cached_property, lru_cache

import torch

from saccade.nn.formats.quantised import Field, Region, looked_up, scaled


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
        stored = fields["weight"].view(torch.uint8)
        return scaled(looked_up(stored, _table(stored.device)), fields["weight_scale_inv"].float(), self.block, region)


@lru_cache(maxsize=8)
def _table(device: torch.device) -> torch.Tensor:
    """Return the value of every byte, [256]."""
    return torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()

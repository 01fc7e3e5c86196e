"""INT4 in groups, symmetric: the format "pack-quantized" of compressed-tensors.

Source: compressed-tensors, compressors/pack_quantized (unpack_from_int32) and quantization/lifecycle/forward.py.
"""

from collections.abc import Mapping
from functools import cached_property, lru_cache

import torch

from saccade.nn.formats.quantised import Region, WeightField, looked_up, scaled

PER_WORD = 8
FLOATS = ("BF16", "F16", "F32")


class Int4Group:
    """Eight columns a word, the first in the lowest bits, stored as value + 8; a scale for *group_size* columns."""

    name = "compressed-tensors pack-quantized, 4 bits"
    unused = ("weight_shape",)
    joins_experts = False

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size

    @cached_property
    def fields(self) -> Mapping[str, WeightField]:
        """Packed words and scales."""
        return {
            "weight_packed": WeightField(("I32",), (1, PER_WORD)),
            "weight_scale": WeightField(FLOATS, (1, self.group_size)),
        }

    def transposed(self) -> None:
        """Return None: columns are packed, rows are not."""

    def dequantise(self, fields: Mapping[str, torch.Tensor], region: Region) -> torch.Tensor:
        """Return (nibble - 8) * scale."""
        # Torch and safetensors store the lowest byte of a word first.
        packed = fields["weight_packed"].view(torch.uint8)
        values = looked_up(packed, _table(packed.device)).narrow(-1, region.column % PER_WORD, region.num_columns)
        return scaled(values, fields["weight_scale"].float(), (1, self.group_size), region)


@lru_cache(maxsize=8)
def _table(device: torch.device) -> torch.Tensor:
    """Return the two values of every byte, [256, 2]."""
    codes = torch.arange(256, device=device)
    return torch.stack((codes % 16, codes // 16), -1).float() - 8

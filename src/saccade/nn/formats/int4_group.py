"""INT4 in groups, symmetric: the format "pack-quantized" of compressed-tensors.

Source: compressed-tensors, compressors/pack_quantized (unpack_from_int32) and quantization/lifecycle/forward.py.
"""

from collections.abc import Mapping
from functools import cached_property

import torch

from saccade.nn.formats.quantised import Field, Region, scaled

BITS = 4
PER_WORD = 32 // BITS
FLOATS = ("BF16", "F16", "F32")


class Int4Group:
    """Eight columns a word, the first in the lowest bits, stored as value + 8; a scale for *group_size* columns."""

    name = "compressed-tensors pack-quantized, 4 bits"
    unused = ("weight_shape",)

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size

    @cached_property
    def fields(self) -> Mapping[str, Field]:
        """Packed words and scales."""
        return {
            "weight_packed": Field(("I32",), (1, PER_WORD)),
            "weight_scale": Field(FLOATS, (1, self.group_size)),
        }

    def dequantise(self, fields: Mapping[str, torch.Tensor], region: Region) -> torch.Tensor:
        """Return (nibble - 8) * scale."""
        packed = fields["weight_packed"]
        shifts = torch.arange(0, 32, BITS, dtype=torch.int32, device=packed.device)
        nibbles = (packed.unsqueeze(-1) >> shifts).bitwise_and_((1 << BITS) - 1).flatten(-2)
        values = nibbles.narrow(-1, region.column % PER_WORD, region.num_columns).float().sub_(1 << (BITS - 1))
        return scaled(values, fields["weight_scale"].float(), (1, self.group_size), region)

"""NVFP4: four-bit floats (e2m1) with a scale (e4m3) for every 16 of them, and one (float32) for the weight.

Sources: NVIDIA's Model Optimizer, modelopt/torch/quantization/qtensor/nvfp4_tensor.py (NVFP4QTensor.dequantize);
compressed-tensors, compressors/nvfp4 and quantization/lifecycle/forward.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import ClassVar

import torch

from saccade.nn.formats.quantised import DerivedValues, Region, WeightField, looked_up, scaled

GROUP_SIZE = 16
PER_BYTE = 2
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of the codes 0 to 7; codes 8 to 15 are their negatives."""


@dataclass(frozen=True)
class Nvfp4:
    """Stores two columns per byte, the first in the lower bits. As in the source, the two scales are multiplied first.

    *values* and *whole* are the suffixes of the values' name and of the weight scale's. With *is_divisor*, the
    checkpoint has the inverse of the weight's scale, and of the activation scale if there is one.
    """

    name: str = "modelopt NVFP4"
    values: str = "weight"
    whole: str = "weight_scale_2"
    is_divisor: bool = False
    joins_experts = False
    kind = "nvfp4"
    unused = ()
    aliases: ClassVar[Mapping[str, str]] = MappingProxyType({})
    derived: ClassVar[Mapping[str, DerivedValues]] = MappingProxyType({})

    @property
    def activation(self) -> str:
        """The suffix of the activation scale's name."""
        return "input_global_scale" if self.is_divisor else "input_scale"

    @property
    def optional(self) -> tuple[str, ...]:
        """The fields that a checkpoint may lack."""
        return (self.activation,)

    @cached_property
    def fields(self) -> Mapping[str, WeightField]:
        """The format's fields: values, scales of groups, and the scales of the whole weight and of the activations."""
        return {
            self.values: WeightField(("U8",), (1, PER_BYTE)),
            "weight_scale": WeightField(("F8_E4M3",), (1, GROUP_SIZE)),
            self.whole: WeightField(("F32",), None),
            self.activation: WeightField(("F32",), None),
        }

    def transposed(self) -> None:
        """Return None: columns are packed, and rows are not."""

    def dequantise(self, fields: Mapping[str, torch.Tensor], region: Region) -> torch.Tensor:
        """Return value * (scale of the group * scale of the weight)."""
        packed, whole = fields[self.values], fields[self.whole].float()
        values = looked_up(packed, _table(packed.device)).narrow(-1, region.column % PER_BYTE, region.num_columns)
        scales = fields["weight_scale"].float()
        scales = scales / whole if self.is_divisor else scales * whole
        return scaled(values, scales, (1, GROUP_SIZE), region)


@lru_cache(maxsize=8)
def _table(device: torch.device) -> torch.Tensor:
    """Return the two values of every byte, [256, 2]."""
    values = torch.tensor((*E2M1, *(-value for value in E2M1)), device=device)
    codes = torch.arange(256, device=device)
    return torch.stack((values[codes % 16], values[codes // 16]), -1)

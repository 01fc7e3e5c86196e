"""Linear layers. Parameters are made empty; the loader fills them.

oneDNN, which multiplies bfloat16 on CPUs, reads weights in blocks. From a plain weight it makes them in every call,
which costs more than multiplying a few rows; `Linear.pack` makes them once. The product is the same, bit for bit.
It also applies an activation, or adds a residual, before it rounds to bfloat16: in one pass instead of two or three.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional


class Activation(NamedTuple):
    """A function of one value, and oneDNN's name for it."""

    function: Callable[[torch.Tensor], torch.Tensor]
    attribute: str
    algorithm: str = ""


IDENTITY = Activation(lambda x: x, "none")
GELU = Activation(functional.gelu, "gelu", "none")
ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "gelu_pytorch_tanh": Activation(partial(functional.gelu, approximate="tanh"), "gelu", "tanh"),
        "gelu": GELU,
        "silu": Activation(functional.silu, "swish"),
    }
)
"""By the names that config.json has for them."""


class Linear(nn.Module):
    """y = x W^T + b. Several layers that read the same input may be one: *partitions* are their output widths."""

    def __init__(self, in_features: int, partitions: int | tuple[int, ...], bias: bool = True) -> None:
        super().__init__()
        self.partitions = (partitions,) if isinstance(partitions, int) else partitions
        out_features = sum(self.partitions)
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self.packed: torch.Tensor | None = None

    def pack(self) -> None:
        """Replace the loaded weight by oneDNN's blocks where oneDNN multiplies: on a CPU in bfloat16."""
        weight = self.weight
        if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and _multiplies_bfloat16():
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.data, None)
            self.weight = nn.Parameter(weight.new_empty(0, weight.shape[1]), requires_grad=False)

    def forward(self, x: torch.Tensor, activation: Activation = IDENTITY) -> torch.Tensor:
        """Map [..., in_features] to [..., out_features] and apply *activation*."""
        if self.packed is None:
            return activation.function(functional.linear(x, self.weight, self.bias))
        attribute, algorithm = activation.attribute, activation.algorithm
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, attribute, [], algorithm)  # type: ignore[no-any-return]

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return *residual* [..., out_features] + forward(x)."""
        if self.packed is None:
            return residual + functional.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.packed, self.bias, "add")  # type: ignore[no-any-return]


def _multiplies_bfloat16() -> bool:
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()  # type: ignore[no-any-return]

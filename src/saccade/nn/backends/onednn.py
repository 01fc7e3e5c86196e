"""Linear layers by oneDNN, which multiplies bfloat16 on CPUs and reads weights in blocks.

From a plain weight it makes them in every call, which costs more than multiplying a few rows; here they are made once.
The product is the same, bit for bit. It also applies an activation, or adds a residual, before it rounds to bfloat16:
in one pass instead of two or three.
"""

import torch

from saccade.nn.activation import Activation


class Product:
    """nn.context.Product."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.data, None)
        self._bias = bias

    def apply(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """In one call."""
        attribute, algorithm = activation.attribute, activation.algorithm
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, attribute, [], algorithm)  # type: ignore[no-any-return]

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """In one call."""
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._packed, self._bias, "add")  # type: ignore[no-any-return]


def multiplies(weight: torch.Tensor) -> bool:
    """Return whether oneDNN multiplies by *weight* here: on a CPU in bfloat16."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()  # type: ignore[no-any-return]

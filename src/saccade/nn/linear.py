"""Linear layers. Parameters are made empty; the loader fills them, and `pack` hands them to the backend."""

import torch
from torch import nn
from torch.nn import functional

from saccade.nn.activation import IDENTITY, Activation
from saccade.nn.context import Backend, Product


class Linear(nn.Module):
    """y = x W^T + b. Several layers that read the same input may be one: *partitions* are their output widths."""

    def __init__(self, in_features: int, partitions: int | tuple[int, ...], bias: bool = True) -> None:
        super().__init__()
        self.partitions = (partitions,) if isinstance(partitions, int) else partitions
        out_features = sum(self.partitions)
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self.product: Product | None = None

    def pack(self, backend: Backend) -> None:
        """Replace the loaded weight by the layout in which *backend* multiplies, where it has one."""
        self.product = backend.product(self.weight, self.bias)
        if self.product is not None:
            self.weight = nn.Parameter(self.weight.new_empty(0, self.weight.shape[1]), requires_grad=False)

    def forward(self, x: torch.Tensor, activation: Activation = IDENTITY) -> torch.Tensor:
        """Map [N, in_features] to [N, out_features] and apply *activation*."""
        if self.product is not None:
            return self.product.apply(x, activation)
        return activation.function(functional.linear(x, self.weight, self.bias))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return *residual* [N, out_features] + forward(x)."""
        if self.product is not None:
            return self.product.add_to(residual, x)
        return residual + functional.linear(x, self.weight, self.bias)


def pack_all(network: nn.Module, backend: Backend) -> None:
    """Pack every linear layer of a loaded *network* for *backend*, the only one it may be run with from then on."""
    for linear in (module for module in network.modules() if isinstance(module, Linear)):
        linear.pack(backend)

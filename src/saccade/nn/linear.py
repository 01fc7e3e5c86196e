"""Linear layers. Parameters are made empty; the loader fills them."""

import torch
from torch import nn
from torch.nn import functional


class Linear(nn.Module):
    """y = x W^T + b. Several layers that read the same input may be one: *partitions* are their output widths."""

    def __init__(self, in_features: int, partitions: int | tuple[int, ...], bias: bool = True) -> None:
        super().__init__()
        self.partitions = (partitions,) if isinstance(partitions, int) else partitions
        out_features = sum(self.partitions)
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., out_features]."""
        return functional.linear(x, self.weight, self.bias)

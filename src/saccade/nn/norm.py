"""Norms, computed in float32 whatever the network's dtype."""

import torch
from torch import nn

from saccade.nn.context import Backend


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (Zhang & Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x_NE: torch.Tensor, backend: Backend) -> torch.Tensor:
        """Normalise [N, size]."""
        return backend.rms_norm(x_NE, self.weight, self.eps)


class LayerNorm(nn.Module):
    """Layer norm with weight and bias over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x_NE: torch.Tensor, backend: Backend) -> torch.Tensor:
        """Normalise [N, size]."""
        return backend.layer_norm(x_NE, self.weight, self.bias, self.eps)

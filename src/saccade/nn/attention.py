"""The attention layer; it calls the backend in the context.

Shapes: N tokens, Q query heads, K key/value heads, D head size.
"""

import torch

from saccade.nn.context import ForwardContext


class Attention:
    """Causal attention of one decoder layer over its paged cache. Holds no parameters."""

    def __init__(self, layer: int, num_heads: int, num_kv_heads: int) -> None:
        self.layer = layer
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads

    def __call__(
        self, q_NQD: torch.Tensor, k_NKD: torch.Tensor, v_NKD: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Attend; returns [N, Q * D]."""
        return context.backend.paged(q_NQD, k_NKD, v_NKD, self.layer, context)

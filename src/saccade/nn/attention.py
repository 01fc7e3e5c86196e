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

    def __call__(self, qk_NHD: torch.Tensor, v_NKD: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Attend. *qk_NHD* holds the Q query heads and then the K key heads of each token; returns [N, Q * D]."""
        q_NQD, k_NKD = qk_NHD.split_with_sizes((self.num_heads, self.num_kv_heads), dim=1)
        return context.backend.paged(q_NQD, k_NKD, v_NKD, self.layer, context)

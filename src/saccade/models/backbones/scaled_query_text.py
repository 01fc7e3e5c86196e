"""A decoder with grouped-query attention, whose queries are scaled up as their positions grow.

Formula: transformers 5.23, modeling_ministral3.py (get_llama_4_attn_scale). Shapes: N tokens, E hidden size, Q query
heads, D head size.
"""

from typing import NamedTuple

import torch

from saccade.models.backbones.grouped_query_text import GroupedQueryAttention, GroupedQueryDecoder
from saccade.models.backbones.text_config import TextConfig
from saccade.nn.context import ForwardContext
from saccade.nn.ops import CosSin


class ScaledRotation(NamedTuple):
    """The rotation of a step's tokens, and the factors [N, 1, 1] of their queries."""

    cos_sin: CosSin
    factors: torch.Tensor


class ScaledQueryAttention(GroupedQueryAttention):
    """Multiplies queries by the factors of their positions."""

    def attend(self, x_NE: torch.Tensor, rotation: ScaledRotation, context: ForwardContext) -> torch.Tensor:
        """Return the attended values [N, Q * D]."""
        q_NQD, own = self.cached_heads(x_NE, rotation.cos_sin, context)
        return self.attention.attend(q_NQD * rotation.factors, own, context)


class ScaledQueryDecoder(GroupedQueryDecoder):
    """Maps embeddings to hidden states; *config* must have a query_scaling."""

    attention = ScaledQueryAttention
    config: TextConfig

    def rotation_at(self, positions: torch.Tensor, dtype: torch.dtype) -> ScaledRotation:
        """Return the rotation and factors for tokens at *positions* int64 [3, N]."""
        scaling = self.config.query_scaling
        if scaling is None:
            raise ValueError("This decoder needs a configuration with a query_scaling.")
        turns_N = (positions[0] // scaling.length).float()
        factors_N = (1 + scaling.beta * (1 + turns_N).log()).to(dtype)
        return ScaledRotation(super().rotation_at(positions, dtype), factors_N.view(-1, 1, 1))

"""The beginning of every backend's attention over keys and values: write the step's own to the cache.

Shapes: N tokens, Q query heads, K key/value heads, D head size, W width of a value.
"""

from typing import Any, Protocol

import torch

from saccade.nn.context import SCALED, ForwardContext, KvCache, PagedLayout, Scoring


class PagedAttention(Protocol):
    """A backend's `paged`, which writes and then calls its `attend`; captured plans that depend on no length."""

    def plan(self, layout: PagedLayout, dtype: torch.dtype) -> Any:
        """See nn.context.AttentionBackend.plan."""

    def plan_captured(self, layout: PagedLayout, dtype: torch.dtype) -> Any:
        """Return the plan of decodes that a graph repeats."""
        return self.plan(layout, dtype)

    def replan(self, plan: Any, layout: PagedLayout) -> None:
        """Change nothing."""
        return

    def paged(
        self,
        q_NQD: torch.Tensor,
        k_NKD: torch.Tensor,
        v_NKW: torch.Tensor,
        layer: int,
        context: ForwardContext,
        scoring: Scoring = SCALED,
    ) -> torch.Tensor:
        """Write keys and values, then attend to the cache."""
        cache = context.paged_cache(layer)
        own = cache.write(context.layout.slot_mapping, k_NKD, v_NKW)
        return self.attend(q_NQD, own, cache, context, scoring)

    def attend(
        self,
        q_NQD: torch.Tensor,
        own: tuple[torch.Tensor, torch.Tensor],
        cache: KvCache,
        context: ForwardContext,
        scoring: Scoring,
    ) -> torch.Tensor:
        """See nn.context.AttentionBackend.attend."""

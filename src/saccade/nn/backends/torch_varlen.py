"""Attention of vision towers on a GPU by PyTorch's attention of variable length: FlashAttention.

It has never run on a GPU: tests compare its arguments with the published signature.
"""

import torch
from torch.nn.attention.varlen import varlen_attn

from saccade.nn.backends.workload import HALF, Workload, not_for_sizes, not_in, not_on_gpu
from saccade.nn.context import PackedLayout

CAPABILITY = (8, 0)
"""FlashAttention 2 needs an Ampere GPU or a later one (README of Dao-AILab/flash-attention)."""


class VisionAttentionBackend:
    """nn.context.VisionAttentionBackend."""

    name = "torch_varlen"
    metadata = ("cu_seqlens", "max_seqlen")
    captures_packed = True

    @staticmethod
    def unavailable(workload: Workload) -> str | None:
        """Return why this backend cannot compute *workload*; None if it can."""
        reason = not_on_gpu(workload) or not_in(workload, HALF) or not_for_sizes(workload, 8, 256)
        if reason is None and torch.cuda.get_device_capability(workload.device) < CAPABILITY:
            return "FlashAttention needs a GPU of compute capability 8.0 or more"
        return reason

    def packed(
        self,
        q_NQD: torch.Tensor,
        k_NQD: torch.Tensor,
        v_NQD: torch.Tensor,
        layout: PackedLayout,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Attend within each sequence in one call."""
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_NQD, k_NQD, v_NQD))
        borders, longest = layout.cu_seqlens, layout.max_seqlen
        output_NQD = varlen_attn(q, k, v, borders, borders, longest, longest, scale=scale)
        return output_NQD.flatten(1)  # type: ignore[union-attr]  # a tuple only with return_aux

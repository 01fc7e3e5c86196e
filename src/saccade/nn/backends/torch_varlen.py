"""Attention of vision towers on a GPU by PyTorch's attention for variable lengths, which is FlashAttention.

PyTorch ships FlashAttention 2. It uses FlashAttention 3 on Hopper, and 4 on Blackwell, if their package is installed.
It has never run on a GPU; tests compare its arguments with the published signature.
"""

from collections.abc import Mapping
from types import MappingProxyType

import structlog
import torch
from torch.nn import attention
from torch.nn.attention.varlen import varlen_attn

from saccade.nn.backends.workload import HALF, Workload, not_for_sizes, not_in, not_on_gpu
from saccade.nn.context import Heads, PackedLayout
from saccade.nn.libraries import Unavailable, attempt

CAPABILITY = (8, 0)
"""FlashAttention 2 needs an Ampere GPU or a later one (README of Dao-AILab/flash-attention)."""

NEWER: Mapping[int, str] = MappingProxyType({9: "FA3", 10: "FA4"})
"""PyTorch's names of newer implementations, by the major number of the compute capability."""

logger = structlog.get_logger(__name__)


class VisionAttentionBackend:
    """Implements nn.context.VisionAttentionBackend with FlashAttention."""

    name = "torch_varlen"
    metadata = ("cu_seqlens", "max_seqlen")
    captures_packed = True

    def __init__(self) -> None:
        name = NEWER.get(torch.cuda.get_device_capability(None)[0])
        if name is None:
            return
        try:
            with attempt():
                # For the whole process: PyTorch's attention of one length, which prompts may take, changes with it.
                attention.activate_flash_attention_impl(name)
        except Unavailable as error:
            logger.info(
                "PyTorch's own FlashAttention computes the vision encoder", instead_of=name, reason=error.reason
            )

    @staticmethod
    def unavailable(workload: Workload) -> str | None:
        """Return why this backend cannot compute *workload*; None if it can."""
        reason = not_on_gpu(workload) or not_in(workload, HALF) or not_for_sizes(workload, 8, 256)
        if reason is None and torch.cuda.get_device_capability(workload.device) < CAPABILITY:
            return "FlashAttention needs a GPU of compute capability 8.0 or more"
        return reason

    def packed(self, heads_NQD: Heads, layout: PackedLayout, scale: float | None = None) -> torch.Tensor:
        """Attend within each sequence in one call."""
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in heads_NQD)
        borders, longest = layout.cu_seqlens, layout.max_seqlen
        output_NQD = varlen_attn(q, k, v, borders, borders, longest, longest, scale=scale)
        return output_NQD.flatten(1)  # type: ignore[union-attr]  # a tuple only with return_aux

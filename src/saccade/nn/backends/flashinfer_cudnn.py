"""Attention of vision towers on a GPU by cuDNN, through FlashInfer's cudnn_batch_prefill_with_kv_cache.

cuDNN builds a graph for each number of sequences and each longest length. So both are rounded up to a few values, and
added sequences have length 0. Source of the arguments: flashinfer/cudnn/prefill.py, release 0.7.2.

It has never run on a GPU; tests/real checks its call against the releases' own signature.
"""

from typing import NamedTuple

import torch
from flashinfer.cudnn import cudnn_batch_prefill_with_kv_cache

from saccade.nn.backends.workload import HALF, Workload, not_for_sizes, not_in, not_on_gpu
from saccade.nn.context import Heads, PackedLayout

WORKSPACE_BYTES = 128 << 20
FEW_SEQUENCES = (8, 16, 32, 64)
LENGTHS = tuple(4096 << doublings for doublings in range(6))
MAX_OFFSET = (1 << 31) - 1
"""Offsets are int32 and count channels, not tokens."""


class _Borders(NamedTuple):
    """A layout's metadata for R sequences, including added ones.

    *lengths* int32 [R, 1, 1, 1] are those of the sequences. *offsets* int32 [R + 1] count the channels before each
    sequence, and all channels. *longest* is at least the longest length.
    """

    lengths: torch.Tensor
    offsets: torch.Tensor
    longest: int


class VisionAttentionBackend:
    """Implements nn.context.VisionAttentionBackend with cuDNN."""

    name = "flashinfer_cudnn"
    metadata = ("cu_seqlens", "max_seqlen", "sequence_lengths")
    captures_packed = False

    def __init__(self) -> None:
        self._workspace: torch.Tensor | None = None
        self._last: tuple[PackedLayout, int, _Borders] | None = None

    @staticmethod
    def unavailable(workload: Workload) -> str | None:
        """Return why this backend cannot compute *workload*; None if it can."""
        return not_on_gpu(workload) or not_in(workload, HALF) or not_for_sizes(workload, 8, 128)

    def packed(self, heads_NQD: Heads, layout: PackedLayout, scale: float | None = None) -> torch.Tensor:
        """Attend within each sequence in one call. Raises ValueError for more channels than an offset can count."""
        q_NQD = heads_NQD[0]
        if q_NQD.numel() > MAX_OFFSET:
            raise ValueError(f"{q_NQD.numel()} channels of queries are more than the {MAX_OFFSET} that cuDNN can take.")
        if self._workspace is None:
            self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.int8, device=q_NQD.device)
        borders = self._borders(layout, q_NQD.shape[1] * q_NQD.shape[2])
        output_NQD, _ = cudnn_batch_prefill_with_kv_cache(
            # Offsets hold for gapless tensors only.
            *(x.contiguous() for x in heads_NQD),
            q_NQD.shape[2] ** -0.5 if scale is None else scale,
            self._workspace,
            max_token_per_sequence=borders.longest,
            max_sequence_kv=borders.longest,
            actual_seq_lens_q=borders.lengths,
            actual_seq_lens_kv=borders.lengths,
            causal=False,
            return_lse=False,
            batch_offsets_q=borders.offsets,
            batch_offsets_o=borders.offsets,
            batch_offsets_k=borders.offsets,
            batch_offsets_v=borders.offsets,
            is_cuda_graph_compatible=True,
        )
        return output_NQD.flatten(1)  # type: ignore[no-any-return]

    def _borders(self, layout: PackedLayout, num_channels: int) -> _Borders:
        """Return the metadata of *layout* for tokens of *num_channels*. All blocks of a tower share it."""
        if self._last is None or self._last[0] is not layout or self._last[1] != num_channels:
            self._last = layout, num_channels, _borders_of(layout, num_channels)
        return self._last[2]


def _borders_of(layout: PackedLayout, num_channels: int) -> _Borders:
    num_sequences = len(layout.sequence_lengths)
    rounded = next((count for count in FEW_SEQUENCES if count >= num_sequences), -(-num_sequences // 64) * 64)
    last = layout.cu_seqlens[-1:].expand(rounded - num_sequences)
    borders = torch.cat((layout.cu_seqlens, last))
    step = LENGTHS[-1]
    longest = next((length for length in LENGTHS if length >= layout.max_seqlen), -(-layout.max_seqlen // step) * step)
    return _Borders(borders.diff().view(-1, 1, 1, 1), borders * num_channels, longest)

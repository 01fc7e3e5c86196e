"""Attention by two Triton kernels, for vision towers and for decodes over a paged cache. Prefill chunks use PyTorch.

With TRITON_INTERPRET=1 Triton computes on a CPU. The tests run the kernels in this way; the kernels have never run on a
GPU.

Shapes: N tokens, S sequences, Q query heads, K key/value heads, D head size, W width of a value.
"""

import torch
import triton

from saccade.nn import context
from saccade.nn.backends import torch_sdpa
from saccade.nn.backends.compilers import no_c_compiler
from saccade.nn.backends.torch_sdpa import PrefillChunk, attend_chunk, attend_prompt, prefill_chunks
from saccade.nn.backends.triton_kernels import decode_kernel, packed_kernel
from saccade.nn.backends.workload import HALF, Workload, not_for_latents, not_for_sizes, not_in, not_on_gpu
from saccade.nn.context import ForwardContext, Heads, KvCache, PackedLayout, PagedLayout, Scoring

MOST_TILE_BYTES, TILE_BYTES = 1 << 7, 1 << 14
"""Bytes of a tile's queries or keys, of one channel and of all: several fit into a GPU's shared memory, 99 KiB.

So a product has at most 64 of them in half precision, and 32 in float32. With 64, float32 does not fit into registers.
"""

LEAST = 16
"""The smallest dimension of a matrix product in Triton."""


def _reason(workload: Workload) -> str | None:
    if workload.device.type == "cpu" and triton.knobs.runtime.interpret:
        # The interpreter's products take the bits of bfloat16 for integers.
        reason = not_in(workload, (torch.float32, torch.float16))
    else:
        reason = not_on_gpu(workload) or not_in(workload, (torch.float32, *HALF)) or no_c_compiler()
    return reason or not_for_sizes(workload, 1, 256)


class VisionAttentionBackend:
    """Implements nn.context.VisionAttentionBackend with Triton."""

    name = "triton"
    metadata = ("cu_seqlens", "max_seqlen", "sequence_lengths")
    captures_packed = True

    @staticmethod
    def unavailable(workload: Workload) -> str | None:
        """Return why this backend cannot compute *workload*; None if it can."""
        return _reason(workload)

    def packed(self, heads_NQD: Heads, layout: PackedLayout, scale: float | None = None) -> torch.Tensor:
        """Attend within each sequence in one launch."""
        q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in heads_NQD)
        num_heads, head_size = q.shape[1:]
        output_NQD = q.new_empty(q.shape)
        steps = (step for x in (q, k, v) for step in x.stride()[:2])
        width = _rounded(head_size)
        tile = tile_size(width, q.dtype)
        grid = (triton.cdiv(layout.max_seqlen, tile), len(layout.sequence_lengths), num_heads)
        packed_kernel[grid](
            *(q, k, v, output_NQD, layout.cu_seqlens, head_size**-0.5 if scale is None else scale),
            *(*steps, output_NQD.stride(0), head_size),
            WIDTH=width,
            ROWS=tile,
            COLUMNS=tile,
        )
        return output_NQD.flatten(1)


class AttentionBackend(context.AttentionBackend):
    """Implements nn.context.AttentionBackend with Triton for decodes, and PyTorch for prefill chunks."""

    name = "triton"
    metadata = torch_sdpa.AttentionBackend.metadata
    captures_decodes = True
    copies_prefixes = True

    @staticmethod
    def unavailable(workload: Workload) -> str | None:
        """Return why this backend cannot compute *workload*; None if it can."""
        return _reason(workload) or not_for_latents(workload)

    def plan(self, layout: PagedLayout, dtype: torch.dtype) -> tuple[PrefillChunk, ...]:
        """Plan the prefill chunks, in the plain backend's form."""
        return prefill_chunks(layout)

    def attend(
        self,
        q_NQD: torch.Tensor,
        own: tuple[torch.Tensor, torch.Tensor],
        cache: KvCache,
        context: ForwardContext,
        scoring: Scoring,
    ) -> torch.Tensor:
        """Compute attention for decode rows in one launch; PyTorch computes prefill chunks."""
        chunks: tuple[PrefillChunk, ...] = context.plan
        num_decodes = context.layout.num_decodes
        outputs = [_decode(q_NQD[:num_decodes], cache, context.layout, scoring)] if num_decodes else []
        if chunks:
            cached = cache.by_slot
            outputs += [attend_chunk(q_NQD, own, cached, chunk, scoring, attend_prompt) for chunk in chunks]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _decode(q_SQD: torch.Tensor, cache: KvCache, layout: PagedLayout, scoring: Scoring) -> torch.Tensor:
    """Compute attention for one query token in each sequence; return [S, Q * W]."""
    num_rows, num_heads, key_size = q_SQD.shape
    block_size, num_kv_heads, value_size = cache.values.shape[1:]
    q = q_SQD if q_SQD.stride(2) == 1 else q_SQD.contiguous()
    output = q.new_empty(num_rows, num_heads * value_size)
    decode_kernel[(num_rows, num_kv_heads)](
        *(q, cache.keys, cache.values, output, layout.block_tables, layout.context_lengths),
        *(key_size**-0.5 if scoring.scale is None else scoring.scale, scoring.window or 0, scoring.soft_cap or 0.0),
        *(q.stride(0), q.stride(1), layout.block_tables.stride(0)),
        *(key_size, value_size, num_heads // num_kv_heads),
        BLOCK_SIZE=block_size,
        HEADS=_rounded(num_heads // num_kv_heads),
        KEY_WIDTH=_rounded(key_size),
        VALUE_WIDTH=_rounded(value_size),
        COLUMNS=tile_size(_rounded(max(key_size, value_size)), q.dtype),
        HAS_WINDOW=scoring.window is not None,
        HAS_SOFT_CAP=scoring.soft_cap is not None,
    )
    return output


def tile_size(width: int, dtype: torch.dtype) -> int:
    """Return how many queries or keys of *width* channels one product has."""
    return min(MOST_TILE_BYTES, TILE_BYTES // width) // dtype.itemsize


def _rounded(size: int) -> int:
    return max(LEAST, 1 << (size - 1).bit_length())

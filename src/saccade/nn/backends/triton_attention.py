"""Attention by two Triton kernels: of vision towers, and of decodes over a paged cache; prefill chunks go to PyTorch.

Both kernels pass over the keys once, with a running maximum and sum (Milakov & Gimelshein 2018, arXiv:1805.02867; Dao et
al. 2022, arXiv:2205.14135). With TRITON_INTERPRET=1 Triton computes on a CPU, which is how the tests run them; they have
never run on a GPU here.

Shapes: N tokens, S sequences, Q query heads, K key/value heads, D head size, W width of a value.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from saccade.nn.backends import torch_sdpa
from saccade.nn.backends.workload import HALF, Workload, not_for_latents, not_for_sizes, not_in, not_on_gpu
from saccade.nn.context import ForwardContext, KvCache, PackedLayout, PagedLayout

ROWS, COLUMNS = 64, 64
"""Queries and keys of one product."""

LEAST = 16
"""The smallest dimension of a matrix product in Triton."""


@triton.jit
def packed_kernel(
    q, k, v, output, cu_seqlens, scale, q_token, q_head, k_token, k_head, v_token, v_head, output_token, head_size,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Attend with ROWS queries of one sequence and head, in both directions. Programs: (rows, sequence, head).

    *_token and *_head are the steps in entries between tokens and heads. WIDTH is head_size rounded up.
    """
    sequence, head = tl.program_id(1), tl.program_id(2).to(tl.int64)
    first = tl.load(cu_seqlens + sequence).to(tl.int64)
    length = tl.load(cu_seqlens + sequence + 1) - first
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(0) * ROWS < length:
        channel = tl.arange(0, WIDTH)
        is_row, is_channel = (row < length)[:, None], channel < head_size
        at_row = (first + row)[:, None]
        queries = tl.load(
            q + at_row * q_token + head * q_head + channel[None, :], mask=is_row & is_channel[None, :], other=0.0
        )
        highest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        result = tl.zeros([ROWS, WIDTH], tl.float32)
        for start in range(0, length, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            is_seen = column < length
            keys = tl.load(
                k + (first + column)[None, :] * k_token + head * k_head + channel[:, None],
                mask=is_seen[None, :] & is_channel[:, None], other=0.0,
            )  # fmt: skip
            scores = tl.dot(queries, keys, input_precision="ieee") * scale
            scores = tl.where(is_seen[None, :], scores, float("-inf"))
            raised = tl.maximum(highest, tl.max(scores, 1))
            shares, shrink = tl.exp(scores - raised[:, None]), tl.exp(highest - raised)
            values = tl.load(
                v + (first + column)[:, None] * v_token + head * v_head + channel[None, :],
                mask=is_seen[:, None] & is_channel[None, :], other=0.0,
            )  # fmt: skip
            result = result * shrink[:, None] + tl.dot(shares.to(values.dtype), values, input_precision="ieee")
            total, highest = total * shrink + tl.sum(shares, 1), raised
        place = output + at_row * output_token + head * head_size + channel[None, :]
        tl.store(place, (result / total[:, None]).to(output.dtype.element_ty), mask=is_row & is_channel[None, :])


@triton.jit
def decode_kernel(
    q, keys, values, output, block_tables, context_lengths, scale, window, soft_cap,
    q_token, q_head, table_row, key_size, value_size, heads_per_kv_head,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """Attend with the query heads that share a key/value head, of one sequence. Programs: (sequence, key/value head).

    Caches are [slots, K, size] without gaps. HEADS and the widths are the numbers of heads and channels, rounded up.
    """
    sequence, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    length = tl.load(context_lengths + sequence)
    member = tl.arange(0, HEADS)
    head = kv_head * heads_per_kv_head + member
    is_head = (member < heads_per_kv_head)[:, None]
    key_channel, value_channel = tl.arange(0, KEY_WIDTH), tl.arange(0, VALUE_WIDTH)
    is_key, is_value = key_channel < key_size, value_channel < value_size
    queries = tl.load(
        q + sequence * q_token + head[:, None] * q_head + key_channel[None, :], mask=is_head & is_key[None, :], other=0.0
    )
    highest = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    result = tl.zeros([HEADS, VALUE_WIDTH], tl.float32)
    first = 0 * length
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0)
    for start in range(first, length, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        is_seen = column < length
        block = tl.load(block_tables + sequence * table_row + column // BLOCK_SIZE, mask=is_seen, other=0).to(tl.int64)
        place = (block * BLOCK_SIZE + column % BLOCK_SIZE) * num_kv_heads + kv_head
        key_columns = tl.load(
            keys + place[None, :] * key_size + key_channel[:, None], mask=is_seen[None, :] & is_key[:, None], other=0.0
        )
        scores = tl.dot(queries, key_columns, input_precision="ieee") * scale
        if HAS_SOFT_CAP:
            # The hyperbolic tangent by the exponential function, which Triton has everywhere.
            scores = soft_cap * (2 / (1 + tl.exp(-2 * scores / soft_cap)) - 1)
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        raised = tl.maximum(highest, tl.max(scores, 1))
        shares, shrink = tl.exp(scores - raised[:, None]), tl.exp(highest - raised)
        value_rows = tl.load(
            values + place[:, None] * value_size + value_channel[None, :],
            mask=is_seen[:, None] & is_value[None, :], other=0.0,
        )  # fmt: skip
        result = result * shrink[:, None] + tl.dot(shares.to(value_rows.dtype), value_rows, input_precision="ieee")
        total, highest = total * shrink + tl.sum(shares, 1), raised
    at = output + (sequence * num_kv_heads * heads_per_kv_head + head)[:, None] * value_size + value_channel[None, :]
    tl.store(at, (result / total[:, None]).to(output.dtype.element_ty), mask=is_head & is_value[None, :])


def _reason(workload: Workload) -> str | None:
    if workload.device.type == "cpu" and triton.knobs.runtime.interpret:
        # The interpreter's products take the bits of bfloat16 for integers.
        reason = not_in(workload, (torch.float32, torch.float16))
    else:
        reason = not_on_gpu(workload) or not_in(workload, (torch.float32, *HALF))
    return reason or not_for_sizes(workload, 1, 256)


class VisionAttentionBackend:
    """nn.context.VisionAttentionBackend."""

    name = "triton"
    metadata = ("cu_seqlens", "max_seqlen", "sequence_lengths")

    @staticmethod
    def unavailable(workload: Workload) -> str | None:
        """Return why this backend cannot compute *workload*; None if it can."""
        return _reason(workload)

    def packed(
        self,
        q_NQD: torch.Tensor,
        k_NQD: torch.Tensor,
        v_NQD: torch.Tensor,
        layout: PackedLayout,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Attend within each sequence in one launch."""
        num_heads, head_size = q_NQD.shape[1:]
        q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q_NQD, k_NQD, v_NQD))
        output_NQD = q.new_empty(q.shape)
        steps = (step for x in (q, k, v) for step in x.stride()[:2])
        grid = (triton.cdiv(layout.max_seqlen, ROWS), len(layout.sequence_lengths), num_heads)
        packed_kernel[grid](
            *(q, k, v, output_NQD, layout.cu_seqlens, head_size**-0.5 if scale is None else scale),
            *(*steps, output_NQD.stride(0), head_size),
            WIDTH=_rounded(head_size),
            ROWS=ROWS,
            COLUMNS=COLUMNS,
        )
        return output_NQD.flatten(1)


@dataclass(frozen=True, slots=True)
class Plan:
    """The prefill chunks of a step, as the plain backend takes them; None without any."""

    prefills: PagedLayout | None
    plain: Any


class AttentionBackend:
    """nn.context.AttentionBackend."""

    name = "triton"
    metadata = torch_sdpa.AttentionBackend.metadata
    captures_decodes = True

    def __init__(self) -> None:
        self._plain = torch_sdpa.AttentionBackend()

    @staticmethod
    def unavailable(workload: Workload) -> str | None:
        """Return why this backend cannot compute *workload*; None if it can."""
        return _reason(workload) or not_for_latents(workload)

    def plan(self, layout: PagedLayout, dtype: torch.dtype) -> Plan:
        """Plan the prefill chunks."""
        first = layout.num_decodes
        if first == len(layout.query_lengths):
            return Plan(None, None)
        prefills = replace(
            layout,
            slot_mapping=layout.slot_mapping[first:],
            block_tables=layout.block_tables[first:],
            context_lengths=layout.context_lengths[first:],
            query_lengths=layout.query_lengths[first:],
            host_context_lengths=layout.host_context_lengths[first:],
            num_decodes=0,
            rows=layout.rows[first:],
        )
        return Plan(prefills, self._plain.plan(prefills, dtype))

    def paged(
        self,
        q_NQD: torch.Tensor,
        k_NKD: torch.Tensor,
        v_NKW: torch.Tensor,
        layer: int,
        context: ForwardContext,
        *,
        scale: float | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> torch.Tensor:
        """Write keys and values, then attend to the cache."""
        options = {"scale": scale, "window": window, "soft_cap": soft_cap}
        plan: Plan = context.plan
        layout, num_decodes = context.layout, context.layout.num_decodes
        outputs = []
        if num_decodes:
            cache = context.paged_cache(layer)
            cache.write(layout.slot_mapping[:num_decodes], k_NKD[:num_decodes], v_NKW[:num_decodes])
            outputs.append(_decode(q_NQD[:num_decodes], cache, layout, **options))
        if plan.prefills is not None:
            rest = ForwardContext(
                context.positions[:, num_decodes:], plan.prefills, context.kv_caches, self._plain, plan.plain
            )
            own = (x[num_decodes:] for x in (q_NQD, k_NKD, v_NKW))
            outputs.append(self._plain.paged(*own, layer, rest, **options))  # type: ignore[arg-type]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _decode(
    q_SQD: torch.Tensor,
    cache: KvCache,
    layout: PagedLayout,
    scale: float | None,
    window: int | None,
    soft_cap: float | None,
) -> torch.Tensor:
    """Attend with one query token a sequence; return [S, Q * W]."""
    num_rows, num_heads, key_size = q_SQD.shape
    block_size, num_kv_heads, value_size = cache.values.shape[1:]
    q = q_SQD if q_SQD.stride(2) == 1 else q_SQD.contiguous()
    output = q.new_empty(num_rows, num_heads * value_size)
    decode_kernel[(num_rows, num_kv_heads)](
        *(q, cache.keys, cache.values, output, layout.block_tables, layout.context_lengths),
        *(key_size**-0.5 if scale is None else scale, window or 0, soft_cap or 0.0),
        *(q.stride(0), q.stride(1), layout.block_tables.stride(0)),
        *(key_size, value_size, num_heads // num_kv_heads),
        BLOCK_SIZE=block_size,
        HEADS=_rounded(num_heads // num_kv_heads),
        KEY_WIDTH=_rounded(key_size),
        VALUE_WIDTH=_rounded(value_size),
        COLUMNS=COLUMNS,
        HAS_WINDOW=window is not None,
        HAS_SOFT_CAP=soft_cap is not None,
    )
    return output


def _rounded(size: int) -> int:
    return max(LEAST, triton.next_power_of_2(size))

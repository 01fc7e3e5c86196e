"""The plain twin of every backend: PyTorch, runs anywhere.

Decode rows of similar length are gathered into one padded batch and attended in one call; a prefill chunk is one call
per sequence. Shapes: N tokens, S decode rows of a group, L context length, Q query heads, K key/value heads, D head
size, G = Q / K query heads per key/value head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from saccade.nn.backends import onednn
from saccade.nn.context import ForwardContext, KvCache, PackedLayout, PagedLayout, Product, Turn
from saccade.nn.rope import rotate, rotate_pairs

SHORT_CONTEXT_BITS = 9
"""Contexts under 2**9 tokens share one group: padding them costs less than another call."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows whose contexts are within a factor of two. *rows* int64 [S], None where the group is all rows.

    *slots* int64 [S * L]; *mask* is additive [S, 1, 1, L], None where all contexts are equally long.
    """

    rows: torch.Tensor | None
    num_rows: int
    slots: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens [start, stop) of the flat batch. Without a cached prefix there is nothing to gather: *slots* is None."""

    start: int
    stop: int
    slots: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Plan:
    """What all layers of a step share. *decodes* is what `plan_decodes` returned, None where there are none."""

    num_decodes: int
    decodes: Any
    prefills: tuple[PrefillChunk, ...]


class Backend:
    """nn.context.Backend by torch.nn.functional. Another may replace `plan_decodes` and `decode`, or `prefill`."""

    def __init__(self, num_threads: int = 1) -> None:
        """Torch counts its threads itself."""

    def use_caches(self, kv_caches: Sequence[KvCache]) -> None:
        """They come with every step."""

    def plan(self, layout: PagedLayout, dtype: torch.dtype) -> Plan:
        """Choose slots and masks for decode rows and prefill chunks."""
        decodes = self.plan_decodes(layout, dtype) if layout.num_decodes else None
        return Plan(layout.num_decodes, decodes, _prefill_chunks(layout))

    def plan_decodes(self, layout: PagedLayout, dtype: torch.dtype) -> Any:
        """Return what `decode` needs to know about the step's decode rows."""
        return _decode_groups(layout, dtype)

    def paged(
        self, q_NQD: torch.Tensor, k_NKD: torch.Tensor, v_NKD: torch.Tensor, layer: int, context: ForwardContext
    ) -> torch.Tensor:
        """Write keys and values, then attend to the cache."""
        plan: Plan = context.plan
        cache = context.kv_caches[layer]
        keys, values = cache.keys.flatten(0, 1), cache.values.flatten(0, 1)
        keys.index_copy_(0, context.layout.slot_mapping, k_NKD)
        values.index_copy_(0, context.layout.slot_mapping, v_NKD)
        outputs = [self.decode(q_NQD[: plan.num_decodes], layer, context)] if plan.num_decodes else []
        for chunk in plan.prefills:
            span = slice(chunk.start, chunk.stop)
            if chunk.slots is None:
                outputs.append(self.prefill(q_NQD[span], k_NKD[span], v_NKD[span], None))
            else:
                gathered_k, gathered_v = keys.index_select(0, chunk.slots), values.index_select(0, chunk.slots)
                outputs.append(self.prefill(q_NQD[span], gathered_k, gathered_v, chunk.mask))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def decode(self, q_SQD: torch.Tensor, layer: int, context: ForwardContext) -> torch.Tensor:
        """Attend with one query token a row; return [S, Q * D]."""
        groups: tuple[DecodeGroup, ...] = context.plan.decodes
        cache = context.kv_caches[layer]
        keys, values = cache.keys.flatten(0, 1), cache.values.flatten(0, 1)
        if groups[0].rows is None:
            return _decode_rows(q_SQD, keys, values, groups[0])
        output = q_SQD.new_empty(q_SQD.shape[0], q_SQD.shape[1] * q_SQD.shape[2])
        for group in groups:
            if group.rows is not None:
                output.index_copy_(0, group.rows, _decode_rows(q_SQD[group.rows], keys, values, group))
        return output

    def prefill(
        self, q_NQD: torch.Tensor, k_LKD: torch.Tensor, v_LKD: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Attend with the last N of L tokens, causally, as *mask* [N, L] says; without it N = L. Return [N, Q * D]."""
        q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q_NQD, k_LKD, v_LKD))
        output = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return output.squeeze(0).transpose(0, 1).flatten(1)

    def packed(
        self, q_NQD: torch.Tensor, k_NQD: torch.Tensor, v_NQD: torch.Tensor, layout: PackedLayout
    ) -> torch.Tensor:
        """Attend within each frame: frames of one size in one call, others one call each."""
        lengths = layout.sequence_lengths
        if min(lengths) == layout.max_seqlen:
            return _packed_equal(q_NQD, k_NQD, v_NQD, len(lengths))
        frames = zip(*(tensor.split_with_sizes(lengths) for tensor in (q_NQD, k_NQD, v_NQD)), strict=True)
        return torch.cat([_packed_equal(q, k, v, 1) for q, k, v in frames])

    def product(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> Product | None:
        """As oneDNN has it, where oneDNN multiplies."""
        return onednn.Product(weight_OI, bias_O) if onednn.multiplies(weight_OI) else None

    def rms_norm(self, x_NE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
        """As torch does it."""
        return functional.rms_norm(x_NE, x_NE.shape[-1:], weight_E, eps)

    def layer_norm(self, x_NE: torch.Tensor, weight_E: torch.Tensor, bias_E: torch.Tensor, eps: float) -> torch.Tensor:
        """As torch does it."""
        return functional.layer_norm(x_NE, x_NE.shape[-1:], weight_E, bias_E, eps)

    def normalise(
        self, pixels_NI: torch.Tensor, mean_C: torch.Tensor, std_C: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """In float32, and rounded at last."""
        values_NCV = pixels_NI.view(pixels_NI.shape[0], len(mean_C), -1).float()
        return values_NCV.sub_(mean_C.unsqueeze(-1)).div_(std_C.unsqueeze(-1)).flatten(1).to(dtype)

    def norm_rotate(
        self, x_NHD: torch.Tensor, weight_MD: torch.Tensor, eps: float, turn: Turn, num_kv_heads: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm all heads in one call, then scale and turn them."""
        num_heads = weight_MD.shape[0]
        normed_NMD = functional.rms_norm(x_NHD[:, :num_heads], x_NHD.shape[-1:], None, eps) * weight_MD
        q_NQD, k_NKD = rotate(normed_NMD, *turn).split_with_sizes((num_heads - num_kv_heads, num_kv_heads), dim=1)
        return q_NQD, k_NKD

    def rotate_pairs(
        self, x_NHD: torch.Tensor, turn_N1C: torch.Tensor, num_heads: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both together."""
        q_NQD, k_NQD = rotate_pairs(x_NHD[:, : 2 * num_heads], turn_N1C).chunk(2, dim=1)
        return q_NQD, k_NQD

    def gate(self, x_NI: torch.Tensor) -> torch.Tensor:
        """SwiGLU's gate (Shazeer 2020, arXiv:2002.05202)."""
        gate, up = x_NI.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)


def _decode_groups(layout: PagedLayout, dtype: torch.dtype) -> tuple[DecodeGroup, ...]:
    lengths = layout.host_context_lengths[: layout.num_decodes]
    buckets: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        buckets.setdefault(max(length.bit_length(), SHORT_CONTEXT_BITS), []).append(row)
    return tuple(_decode_group(layout, rows, dtype) for rows in buckets.values())


def _decode_group(layout: PagedLayout, members: list[int], dtype: torch.dtype) -> DecodeGroup:
    device = layout.slot_mapping.device
    whole = len(members) == layout.num_decodes
    rows = None if whole else torch.tensor(members, device=device)
    tables = layout.block_tables[: layout.num_decodes] if rows is None else layout.block_tables[rows]
    lengths = layout.context_lengths[: layout.num_decodes] if rows is None else layout.context_lengths[rows]
    host = [layout.host_context_lengths[row] for row in members]
    longest = max(host)
    index = torch.arange(longest, device=device)
    # Padding repeats the row's own last slot: another sequence's slot could hold a NaN, which no mask removes.
    clamped = torch.minimum(index, (lengths - 1).unsqueeze(1))
    slots = tables.gather(1, clamped // layout.block_size) * layout.block_size + clamped % layout.block_size
    mask = None
    if min(host) != longest:
        hidden = (index >= lengths.unsqueeze(1))[:, None, None, :]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
    return DecodeGroup(rows, len(members), slots.flatten(), mask)


def _prefill_chunks(layout: PagedLayout) -> tuple[PrefillChunk, ...]:
    device = layout.slot_mapping.device
    chunks, start = [], layout.num_decodes
    for row in range(layout.num_decodes, len(layout.query_lengths)):
        queries, context = layout.query_lengths[row], layout.host_context_lengths[row]
        slots = mask = None
        if context > queries:
            index = torch.arange(context, device=device)
            slots = layout.block_tables[row][index // layout.block_size] * layout.block_size + index % layout.block_size
            mask = index <= index[context - queries :].unsqueeze(1)
        chunks.append(PrefillChunk(start, start + queries, slots, mask))
        start += queries
    return tuple(chunks)


def _decode_rows(q_SQD: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: DecodeGroup) -> torch.Tensor:
    num_kv_heads, head_dim = keys.shape[1:]
    k_SKLD = keys.index_select(0, group.slots).view(group.num_rows, -1, num_kv_heads, head_dim).transpose(1, 2)
    v_SKLD = values.index_select(0, group.slots).view(group.num_rows, -1, num_kv_heads, head_dim).transpose(1, 2)
    # With one query token a row, the query heads that share a key head can stand where query tokens would.
    q_SKGD = q_SQD.reshape(group.num_rows, num_kv_heads, -1, head_dim)
    output = functional.scaled_dot_product_attention(q_SKGD, k_SKLD, v_SKLD, attn_mask=group.mask)
    return output.reshape(group.num_rows, -1)


def _packed_equal(q_NQD: torch.Tensor, k_NQD: torch.Tensor, v_NQD: torch.Tensor, num_sequences: int) -> torch.Tensor:
    num_heads, head_dim = q_NQD.shape[1:]
    shape = (num_sequences, -1, num_heads, head_dim)
    q, k, v = (tensor.reshape(shape).transpose(1, 2) for tensor in (q_NQD, k_NQD, v_NQD))
    return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, num_heads * head_dim)

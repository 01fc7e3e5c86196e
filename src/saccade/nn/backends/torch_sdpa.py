"""Attention by PyTorch alone, on any device: the reference for every other backend.

Decode rows of similar length are gathered into one padded batch, for one call. Each prefill chunk is one call. Latents
are the keys and values of one head. PyTorch's fused kernel needs keys and values of one width, so the output's channels
past the value's width are computed and dropped. Shapes: N tokens, S decode rows of a group, L context length, Q query
heads, K key/value heads, D head size, W width of a value, C width of a latent, G = Q / K query heads per key/value
head.

On a GPU, cuDNN's attention is off (engine.executor.loader). Then only flash attention takes grouped heads, and it alone
needs no mask for causal chunks after a prefix. It takes no masks, no float32, no heads of more than FLASH_WIDTH
channels, and no keys and values of different widths. The memory-efficient kernel takes the rest, with keys and values
repeated for each query head. For grouped heads with a mask, PyTorch would use its plain function. Its scores have a
float32 for each head, query and token of the context. None of this has run on a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from saccade.nn import context
from saccade.nn.backends.workload import HALF, Workload
from saccade.nn.cache_values import CacheValues
from saccade.nn.context import ForwardContext, Heads, KvCache, LatentCache, PackedLayout, PagedLayout, Scoring
from saccade.nn.transfer import to_device

KeysValues = tuple[torch.Tensor, torch.Tensor]
"""Keys [tokens, K, D] and values [tokens, K, W]."""

Cached = tuple[CacheValues, CacheValues]
"""A layer's cache: keys [slots, K, D] and values [slots, K, W]."""

AttendPrompt = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, Scoring], torch.Tensor]
"""Attends with q [N, Q, D] over k [L, K, D] and v [L, K, W]; returns [N, Q * W].

The mask, bool [N, L], tells which tokens each query sees. If it is None, the queries are the last of the tokens, and
see no later ones.
"""

SHORT_CONTEXT_BITS = 9
"""Contexts under 2**9 tokens share one group: padding them costs less than another call."""

FLASH_WIDTH = 256
"""The most channels of a head for PyTorch's flash attention."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows whose contexts are within a factor of two, or short. *rows* int64 [S] is None for all rows.

    *slots* int64 [S * L] are places in the cache; *lengths* int64 [S] are those of the contexts. *mask* [S, 1, 1, L] is
    additive, and None if all contexts are equally long.
    """

    rows: torch.Tensor | None
    slots: torch.Tensor
    lengths: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens [start, stop) of the flat batch. *slots* is None without a cached prefix.

    *mask* bool [stop - start, L] tells which tokens of the context each query sees. None is causal: the queries are the
    last tokens of the context. *horizons* int64 [stop - start] are those of PagedLayout.
    """

    start: int
    stop: int
    slots: torch.Tensor | None
    mask: torch.Tensor | None
    horizons: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class SdpaPlan:
    """The plan that all layers of a step share."""

    num_decodes: int
    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillChunk, ...]


class AttentionBackend(context.AttentionBackend):
    """Implements nn.context.AttentionBackend with PyTorch alone."""

    name = "torch_sdpa"
    metadata: tuple[str, ...] = (
        "slot_mapping",
        "block_tables",
        "context_lengths",
        "query_lengths",
        "host_context_lengths",
    )
    captures_decodes = False
    copies_prefixes = True

    def plan(self, layout: PagedLayout, dtype: torch.dtype) -> SdpaPlan:
        """Choose slots and masks for decode rows and prefill chunks."""
        return SdpaPlan(layout.num_decodes, _decode_groups(layout, dtype), prefill_chunks(layout))

    def attend(
        self, q_NQD: torch.Tensor, own: KeysValues, cache: KvCache, context: ForwardContext, scoring: Scoring
    ) -> torch.Tensor:
        """Compute attention for decode rows group by group, and for prefill chunks one by one."""
        return self._attend_cached(q_NQD, own, cache.by_slot, context.plan, scoring)

    def latent(
        self,
        q_NQC: torch.Tensor,
        latent_NC: torch.Tensor,
        layer: int,
        context: ForwardContext,
        *,
        value_width: int,
        scale: float,
    ) -> torch.Tensor:
        """Write latents, then attend to the cache."""
        latent_N1C = latent_NC.unsqueeze(1)
        cache = context.cache(layer, LatentCache)
        latents = CacheValues(cache.latents.flatten(0, 1).unsqueeze(1), cache.scale)
        latent_N1C = latents.write(context.layout.slot_mapping, latent_N1C)
        own, cached = (latent_N1C, latent_N1C), (latents, latents)
        output = self._attend_cached(q_NQC, own, cached, context.plan, Scoring(scale))
        return output.view(q_NQC.shape)[..., :value_width]

    def _attend_cached(
        self, q_NQD: torch.Tensor, own: KeysValues, cached: Cached, plan: SdpaPlan, scoring: Scoring
    ) -> torch.Tensor:
        """Compute attention for the step; return [N, Q * W]. The cache also has the step's *own* keys and values."""
        outputs = [_decode(q_NQD[: plan.num_decodes], cached, plan.decodes, scoring)] if plan.num_decodes else []
        outputs += [attend_chunk(q_NQD, own, cached, chunk, scoring, self.attend_prompt) for chunk in plan.prefills]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def attend_prompt(
        self, q_NQD: torch.Tensor, k_LKD: torch.Tensor, v_LKW: torch.Tensor, mask: torch.Tensor | None, scoring: Scoring
    ) -> torch.Tensor:
        """Implements AttendPrompt."""
        return attend_prompt(q_NQD, k_LKD, v_LKW, mask, scoring)

    @staticmethod
    def unavailable(workload: Workload) -> str | None:
        """Return None: this backend computes anywhere."""


class VisionAttentionBackend:
    """Implements nn.context.VisionAttentionBackend with PyTorch alone."""

    name = "torch_sdpa"
    metadata = ("max_seqlen", "sequence_lengths")
    captures_packed = False

    @staticmethod
    def unavailable(workload: Workload) -> str | None:
        """Return None: this backend computes anywhere."""

    def packed(self, heads_NQD: Heads, layout: PackedLayout, scale: float | None = None) -> torch.Tensor:
        """Attend within each sequence: in one call if all have the same length, otherwise in one call each."""
        lengths = layout.sequence_lengths
        if min(lengths) == layout.max_seqlen:
            return attend_within_equal(heads_NQD, len(lengths), scale)
        sequences = zip(*(tensor.split_with_sizes(lengths) for tensor in heads_NQD), strict=True)
        return torch.cat([attend_within_equal(sequence, 1, scale) for sequence in sequences])


def _decode_groups(layout: PagedLayout, dtype: torch.dtype) -> tuple[DecodeGroup, ...]:
    lengths = layout.host_context_lengths[: layout.num_decodes]
    buckets: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        buckets.setdefault(max(length.bit_length(), SHORT_CONTEXT_BITS), []).append(row)
    return tuple(_decode_group(layout, rows, dtype) for rows in buckets.values())


def _decode_group(layout: PagedLayout, members: list[int], dtype: torch.dtype) -> DecodeGroup:
    device = layout.slot_mapping.device
    whole = len(members) == layout.num_decodes
    rows = None if whole else to_device(np.array(members, np.int64), device)
    tables = layout.block_tables[: layout.num_decodes] if rows is None else layout.block_tables[rows]
    lengths = layout.context_lengths[: layout.num_decodes] if rows is None else layout.context_lengths[rows]
    host = [layout.host_context_lengths[row] for row in members]
    longest = max(host)
    index = torch.arange(longest, device=device)
    # Padding repeats the row's own last slot: another sequence's slot could hold a NaN, which no mask removes.
    clamped = torch.minimum(index, (lengths - 1).unsqueeze(1))
    slots = tables.gather(1, clamped // layout.block_size) * layout.block_size + clamped % layout.block_size
    mask = None if min(host) == longest else _additive(index < lengths.unsqueeze(1), dtype)
    return DecodeGroup(rows, slots.flatten(), lengths, mask)


def _additive(visible_SL: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the mask [S, 1, 1, L] that is added to scores."""
    mask_SL = torch.zeros(visible_SL.shape, dtype=dtype, device=visible_SL.device)
    return mask_SL.masked_fill_(~visible_SL, float("-inf"))[:, None, None, :]


def prefill_chunks(layout: PagedLayout) -> tuple[PrefillChunk, ...]:
    """Return the prefill chunks of a step. Those after a cached prefix have slots, and on a CPU a mask."""
    device = layout.slot_mapping.device
    chunks, start = [], layout.num_decodes
    for row in range(layout.num_decodes, len(layout.query_lengths)):
        queries, context = layout.query_lengths[row], layout.host_context_lengths[row]
        slots = mask = None
        if context > queries:
            index = torch.arange(context, device=device)
            slots = layout.block_tables[row][index // layout.block_size] * layout.block_size + index % layout.block_size
            if device.type == "cpu":
                mask = index <= index[context - queries :].unsqueeze(1)
        horizons = None if layout.horizons is None else layout.horizons[start : start + queries]
        chunks.append(PrefillChunk(start, start + queries, slots, mask, horizons))
        start += queries
    return tuple(chunks)


def attend_chunk(
    q_NQD: torch.Tensor, own: KeysValues, cached: Cached, chunk: PrefillChunk, scoring: Scoring, attend: AttendPrompt
) -> torch.Tensor:
    """Compute attention for *chunk*; return [stop - start, Q * W]. *q_NQD* and *own* are the whole step's."""
    span = slice(chunk.start, chunk.stop)
    if chunk.slots is None:
        (k, v), first = (own[0][span], own[1][span]), 0
    else:
        first = 0 if scoring.window is None else max(len(chunk.slots) - len(q_NQD[span]) - scoring.window + 1, 0)
        k, v = _gather(cached, chunk.slots[first:], q_NQD.dtype)
    mask = chunk.mask
    horizons = chunk.horizons if scoring.looks_ahead else None
    if scoring.window is not None or horizons is not None:
        mask = _seen_by_chunk(q_NQD[span], len(k), first, horizons, scoring.window)
    return attend(q_NQD[span], k, v, mask, scoring)


def _gather(cached: Cached, slots: torch.Tensor, dtype: torch.dtype) -> KeysValues:
    """Return keys and values at *slots*; latents, which are both, are gathered once."""
    keys, values = cached
    k = keys.read(slots, dtype)
    return k, k if values is keys else values.read(slots, dtype)


def _decode(q_SQD: torch.Tensor, cached: Cached, groups: tuple[DecodeGroup, ...], scoring: Scoring) -> torch.Tensor:
    """Compute attention for one query token in each row; return [S, Q * W]."""
    if groups[0].rows is None:
        return _decode_rows(q_SQD, cached, groups[0], scoring)
    output = q_SQD.new_empty(q_SQD.shape[0], q_SQD.shape[1] * cached[1].slots.shape[2])
    for group in groups:
        if group.rows is not None:
            output.index_copy_(0, group.rows, _decode_rows(q_SQD[group.rows], cached, group, scoring))
    return output


def _decode_rows(q_SQD: torch.Tensor, cached: Cached, group: DecodeGroup, scoring: Scoring) -> torch.Tensor:
    num_rows, num_kv_heads = len(group.lengths), cached[0].slots.shape[1]
    slots, mask = _seen(group, scoring.window, q_SQD.dtype)
    k_SKLD, v_SKLW = (part.unflatten(0, (num_rows, -1)).transpose(1, 2) for part in _gather(cached, slots, q_SQD.dtype))
    # With one query token a row, the query heads that share a key head can take the place of query tokens.
    q_SKGD = q_SQD.reshape(num_rows, num_kv_heads, -1, q_SQD.shape[2])
    return _attend(q_SKGD, k_SKLD, v_SKLW, mask, False, scoring).reshape(num_rows, -1)


def _seen(group: DecodeGroup, window: int | None, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the slots of the last *window* tokens of each row, and the mask of rows with fewer."""
    slots_SL = group.slots.unflatten(0, (len(group.lengths), -1))
    if window is None or window >= slots_SL.shape[1]:
        return group.slots, group.mask
    lengths = group.lengths.unsqueeze(1)
    index = (lengths - window).clamp_(min=0) + torch.arange(window, device=lengths.device)
    mask = None if group.mask is None else _additive(index < lengths, dtype)
    return slots_SL.gather(1, index).flatten(), mask


def _seen_by_chunk(
    q_NQD: torch.Tensor, length: int, first: int, horizons_N: torch.Tensor | None, window: int | None
) -> torch.Tensor:
    """Return which of L tokens each query sees, bool [N, L]. The queries are the last N of them.

    *first* is the place in the context of the first of the L tokens.
    """
    index = torch.arange(first, first + length, device=q_NQD.device)
    own = index[length - len(q_NQD) :].unsqueeze(1)
    mask_NL = index <= own if horizons_N is None else index < horizons_N.unsqueeze(1)
    if window is not None:
        mask_NL &= index > own - window
    return mask_NL


def attend_prompt(
    q_NQD: torch.Tensor, k_LKD: torch.Tensor, v_LKW: torch.Tensor, mask_NL: torch.Tensor | None, scoring: Scoring
) -> torch.Tensor:
    """Implements AttendPrompt by PyTorch."""
    q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q_NQD, k_LKD, v_LKW))
    return _attend(q, k, v, mask_NL, mask_NL is None, scoring).squeeze(0).transpose(0, 1).flatten(1)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, scoring: Scoring
) -> torch.Tensor:
    """Attend with q [B, Q, N, D] over k [B, K, L, D] and v [B, K, L, W]; return [B, Q, N, W].

    With *causal*, no mask is needed: the queries are the last N of the L tokens.
    """
    if k.shape[1] == 1:
        # A view of the one head for every query head; grouped attention would copy it.
        k, v = k.expand(-1, q.shape[1], -1, -1), v.expand(-1, q.shape[1], -1, -1)
    group = q.shape[1] // k.shape[1]
    num_queries, num_tokens = q.shape[2], k.shape[2]
    if scoring.soft_cap is None:
        flash = mask is None and q.dtype in HALF and q.shape[-1] == v.shape[-1] <= FLASH_WIDTH
        if group > 1 and q.device.type != "cpu" and not flash:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        if causal and num_queries < num_tokens:
            mask, causal = _causal_mask(num_queries, num_tokens, q.device), False
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scoring.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q.float() @ k.float().transpose(-1, -2) * (q.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale)
    scores = scores.div_(scoring.soft_cap).tanh_().mul_(scoring.soft_cap)
    if causal:
        mask = _lower_right(num_queries, num_tokens, scores.device)
    if mask is not None:
        scores = scores.masked_fill_(~mask, float("-inf")) if mask.dtype == torch.bool else scores.add_(mask)
    return scores.softmax(-1).to(v.dtype) @ v


def _causal_mask(num_queries: int, num_tokens: int, device: torch.device) -> torch.Tensor:
    """Return a mask for queries that are the last of the tokens; on a GPU only a stand-in, which no kernel reads."""
    if device.type == "cpu":
        return _lower_right(num_queries, num_tokens, device)
    from torch.nn.attention.bias import causal_lower_right  # half a second: it imports torch's compiler

    return causal_lower_right(num_queries, num_tokens)


def _lower_right(num_queries: int, num_tokens: int, device: torch.device) -> torch.Tensor:
    ones = torch.ones(num_queries, num_tokens, dtype=torch.bool, device=device)
    return ones.tril_(num_tokens - num_queries)


def attend_within_equal(heads_NQD: Heads, num_sequences: int, scale: float | None) -> torch.Tensor:
    """Attend within each of the sequences, which are equally long; return [N, Q * D]."""
    num_heads, head_dim = heads_NQD[0].shape[1:]
    shape = (num_sequences, -1, num_heads, head_dim)
    q, k, v = (tensor.reshape(shape).transpose(1, 2) for tensor in heads_NQD)
    output = functional.scaled_dot_product_attention(q, k, v, scale=scale)
    return output.transpose(1, 2).reshape(-1, num_heads * head_dim)

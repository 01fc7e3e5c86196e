"""The input that every layer gets in one forward pass, and the protocols of attention backends.

Shapes: N tokens of the step, flat over all sequences; S sequences; M blocks of the longest block table; Q query heads,
K key/value heads, D head size, W width of a value, C width of a latent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from saccade.nn.cache_values import CacheValues

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, keys and values of a vision tower, each [N, Q, D]."""


class KvCache(NamedTuple):
    """One layer's paged cache: keys [num_blocks, block_size, K, D], values [num_blocks, block_size, K, W].

    Both have the network's dtype, or are divided by their scales and stored as float8_e4m3fn (saccade.nn.cache_values).
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scale: float = 1.0
    value_scale: float = 1.0

    @property
    def by_slot(self) -> tuple[CacheValues, CacheValues]:
        """The keys and values by slot, [slots, K, ...]."""
        keys = CacheValues(self.keys.flatten(0, 1), self.key_scale)
        return keys, CacheValues(self.values.flatten(0, 1), self.value_scale)

    def write(
        self, slot_mapping: torch.Tensor, k_NKD: torch.Tensor, v_NKW: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values of tokens to their slots; return them as a read would return them."""
        keys, values = self.by_slot
        return keys.write(slot_mapping, k_NKD), values.write(slot_mapping, v_NKW)


class LatentCache(NamedTuple):
    """One layer's paged latents [num_blocks, block_size, width + rope_width], stored as in KvCache, with one scale."""

    latents: torch.Tensor
    scale: float = 1.0


class RecurrentState(NamedTuple):
    """One layer's recurrent states, in one or more tensors *live* [rows, ...] and *checkpoints* [num_checkpoints, ...].

    A layer reads and writes the live states in PagedLayout.rows. States after proposed tokens are in further rows, and
    a sequence continues from one of them. After each turn, the layer saves some states as checkpoints.
    """

    live: tuple[torch.Tensor, ...]
    checkpoints: tuple[torch.Tensor, ...]

    def save(self, turn: "Turn") -> None:
        """Copy the states after *turn* to the checkpoints that it names."""
        if len(turn.checkpoints):
            for live, checkpoints in zip(self.live, self.checkpoints, strict=True):
                checkpoints.index_copy_(0, turn.checkpoints, live.index_select(0, turn.saved_rows))


LayerCache = KvCache | LatentCache | RecurrentState
Cache = TypeVar("Cache", KvCache, LatentCache, RecurrentState)


class Scoring(NamedTuple):
    """How a layer attends. Layers may differ in this, and in their head sizes.

    Scores are multiplied by *scale*, or by D ** -0.5 if it is None. With *soft_cap* c, a score s becomes
    c * tanh(s / c). With *window*, a token attends to that many tokens, including itself. If the layer *looks_ahead*,
    it also attends to all later ones up to its horizon in PagedLayout.
    """

    scale: float | None = None
    window: int | None = None
    soft_cap: float | None = None
    looks_ahead: bool = False


SCALED = Scoring()
"""Attention to all earlier tokens, scaled by the size of the heads."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens whose recurrent states are updated together: for each sequence, those up to the next state to save.

    *tokens* int64 are their places in the step; sequences of one token come first. *rows* int32 are the rows of the
    sequences' states, and *lengths* count the sequences' tokens. The states in *saved_rows* int64 go to *checkpoints*
    int64. With proposals, all S sequences have L tokens. The state after each token then goes to a row of *trail* int64
    [S, L]; the last one's is the sequence's own row.
    """

    tokens: torch.Tensor
    rows: torch.Tensor
    lengths: tuple[int, ...]
    saved_rows: torch.Tensor
    checkpoints: torch.Tensor
    trail: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """The layout of the step's tokens. The *num_decodes* sequences with a single query token come first.

    *slot_mapping* int64 [N] is each token's cache slot (block * block_size + offset). *block_tables* int64 [S, M] is
    padded with any valid block. *context_lengths* int64 [S] counts cached tokens, including this step's.
    *host_context_lengths* are the same numbers on the host, and *query_lengths* those of this step's tokens, so that no
    backend waits for the device. *rows* int32 [S] is the row of each sequence's recurrent states, which are updated in
    *turns* if there are any. *horizons* int64 [N] are for layers that look ahead: a token sees its sequence up to this
    index, exclusive. It is the index after the token's image, or after the token itself. *horizons* is None if no token
    sees further than itself. Single tokens never do.
    """

    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    context_lengths: torch.Tensor
    query_lengths: tuple[int, ...]
    host_context_lengths: tuple[int, ...]
    num_decodes: int
    block_size: int
    rows: torch.Tensor
    turns: tuple[Turn, ...] = ()
    horizons: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Sequences packed end to end without a cache, for the attention of vision towers: frames, views, clips or windows.

    *cu_seqlens* int32 [S + 1] are the borders, on the device; *max_seqlen* and *sequence_lengths* are host values.
    """

    cu_seqlens: torch.Tensor
    max_seqlen: int
    sequence_lengths: tuple[int, ...]


class AttentionBackend(Protocol):
    """An implementation of a decoder's attention over a paged cache. No method may make the host wait for the device.

    *metadata* names the fields of PagedLayout that the backend reads. *captures_decodes* is set if a CUDA graph can
    repeat the work of decodes, after `replan` if it depends on lengths that the host knows. *copies_prefixes* is set if
    a chunk attends to a copy of its cached prefix.
    """

    name: str
    metadata: tuple[str, ...]
    captures_decodes: bool
    copies_prefixes: bool

    def plan(self, layout: PagedLayout, dtype: torch.dtype) -> Any:
        """Return data that all layers of one step share (masks, indices); layers get it as context.plan."""

    def plan_captured(self, layout: PagedLayout, dtype: torch.dtype) -> Any:
        """Return a plan for decodes that a CUDA graph repeats; later tables have no more blocks than *layout*'s."""
        return self.plan(layout, dtype)

    def replan(self, plan: Any, layout: PagedLayout) -> None:
        """Before a replay, update *plan*, from plan_captured, to the lengths of *layout*, which has as many rows.

        A plan that depends on no length stays as it is.
        """
        return

    def paged(
        self,
        q_NQD: torch.Tensor,
        k_NKD: torch.Tensor,
        v_NKW: torch.Tensor,
        layer: int,
        context: "ForwardContext",
        scoring: Scoring = SCALED,
    ) -> torch.Tensor:
        """Write keys and values into the layer's cache, attend causally over it, and return [N, Q * W].

        The width W of values may differ from that of keys.
        """
        cache = context.cache(layer, KvCache)
        own = cache.write(context.layout.slot_mapping, k_NKD, v_NKW)
        return self.attend(q_NQD, own, cache, context, scoring)

    def attend(
        self,
        q_NQD: torch.Tensor,
        own: tuple[torch.Tensor, torch.Tensor],
        cache: KvCache,
        context: "ForwardContext",
        scoring: Scoring,
    ) -> torch.Tensor:
        """Attend causally to *cache*, to which the step's keys and values were written; return [N, Q * W].

        *own* are the step's keys [N, K, D] and values [N, K, W] as a read returns them. Layers may share a cache.
        """

    def latent(
        self,
        q_NQC: torch.Tensor,
        latent_NC: torch.Tensor,
        layer: int,
        context: "ForwardContext",
        *,
        value_width: int,
        scale: float,
    ) -> torch.Tensor:
        """Write latents into the layer's cache, attend causally over it, and return [N, Q, value_width].

        A latent is the key of all query heads; its first *value_width* channels are the value. The queries are
        absorbed: multiplied by the matrix that computes keys from latents (DeepSeek-V2, arXiv:2405.04434, section
        2.1.2). Scores are multiplied by *scale*.
        """


class VisionAttentionBackend(Protocol):
    """An implementation of a vision tower's attention. No method may make the host wait for the device.

    *metadata* names the fields of PackedLayout that the backend reads. *captures_packed* is set if the work of a call
    depends only on the number of sequences and on the longest one. Other lengths may be 0.
    """

    name: str
    metadata: tuple[str, ...]
    captures_packed: bool

    def packed(self, heads_NQD: Heads, layout: PackedLayout, scale: float | None = None) -> torch.Tensor:
        """Attend in both directions within each packed sequence; return [N, Q * D]. See Scoring for *scale*."""


def check_metadata(backend: AttentionBackend | VisionAttentionBackend, layout: PagedLayout | PackedLayout) -> None:
    """Raise ValueError if *layout* lacks a field that *backend* reads."""
    missing = [name for name in backend.metadata if getattr(layout, name, None) is None]
    if missing:
        raise ValueError(
            f"The attention backend {backend.name} needs {', '.join(missing)}, which the layout does not have."
        )


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """One step, as passed to every layer. *positions* int64 [3, N] are each token's time, height and width.

    *windowed* is the context of layers with a window, if they have blocks of their own. In it, a sequence begins with
    the first block that a token of the step sees.

    Raises ValueError for positions of another shape, which a gather along the axes would accept. Also raises it for a
    layout without a field that the backend needs.
    """

    positions: torch.Tensor
    layout: PagedLayout
    kv_caches: Sequence[LayerCache]
    backend: AttentionBackend
    plan: Any
    windowed: "ForwardContext | None" = None

    def __post_init__(self) -> None:
        """Validate the host's values, once per step."""
        check_metadata(self.backend, self.layout)
        num_tokens = self.layout.slot_mapping.shape[0]
        if self.positions.shape != (3, num_tokens):
            raise ValueError(f"Positions of {num_tokens} tokens are [3, {num_tokens}], not {[*self.positions.shape]}.")

    def of_window(self, window: int | None) -> "ForwardContext":
        """Return the context for a layer with this *window*."""
        return self if window is None or self.windowed is None else self.windowed

    def cache(self, layer: int, kind: type[Cache]) -> Cache:
        """Return the cache of *layer*. Raises TypeError if it is not of that *kind*."""
        cache = self.kv_caches[layer]
        if not isinstance(cache, kind):
            raise TypeError(f"Layer {layer} has a {type(cache).__name__}, not a {kind.__name__}.")
        return cache

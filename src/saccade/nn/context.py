"""ForwardContext: what one forward pass hands to every layer, and the backend that it carries.

Shapes: N tokens of the step, flat over all sequences; S sequences; M blocks of the longest block table; Q query heads,
K key/value heads, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from saccade.nn.activation import Activation

Turn = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine [N, 1, D] of every token's angles, as saccade.nn.rope.rotation gives them."""


class KvSpec(NamedTuple):
    """The paged attention state that a network needs: one key and one value vector per layer, head and token."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


class KvCache(NamedTuple):
    """One layer's paged cache; both tensors are [num_blocks, block_size, K, D]."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """Where the step's tokens lie. Sequences with a single query token come first: *num_decodes* of them.

    *slot_mapping* int64 [N] names each token's cache slot (block * block_size + offset); *block_tables* int64 [S, M] is
    padded with any valid block; *context_lengths* int64 [S] counts cached tokens, this step's included.
    *query_lengths* and *host_context_lengths* are the same facts on the host, so that no backend has to ask the device.
    """

    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    context_lengths: torch.Tensor
    query_lengths: tuple[int, ...]
    host_context_lengths: tuple[int, ...]
    num_decodes: int
    block_size: int


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Sequences laid end to end without a cache, as vision towers attend: one sequence per frame.

    *cu_seqlens* int32 [S + 1] are the borders, on the device; *max_seqlen* and *sequence_lengths* are host values.
    """

    cu_seqlens: torch.Tensor
    max_seqlen: int
    sequence_lengths: tuple[int, ...]


class Product(Protocol):
    """A linear layer in a backend's own layout: x W^T + b."""

    def apply(self, x_NI: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Return activation(x W^T + b) [N, O]."""

    def add_to(self, residual_NO: torch.Tensor, x_NI: torch.Tensor) -> torch.Tensor:
        """Return residual + x W^T + b [N, O]."""


class Backend(Protocol):
    """One way to compute attention, and what else stands around it. Nothing may make the host wait.

    Scores of attention are scaled by D ** -0.5.
    """

    def use_caches(self, kv_caches: "Sequence[KvCache]") -> None:
        """Take these as the layers' caches from now on."""

    def plan(self, layout: PagedLayout, dtype: torch.dtype) -> Any:
        """Return what all layers of one step share (masks, indices); the result comes back as context.plan."""

    def paged(
        self, q_NQD: torch.Tensor, k_NKD: torch.Tensor, v_NKD: torch.Tensor, layer: int, context: "ForwardContext"
    ) -> torch.Tensor:
        """Write keys and values into the layer's cache, attend causally over it, return [N, Q * D]."""

    def packed(
        self, q_NQD: torch.Tensor, k_NQD: torch.Tensor, v_NQD: torch.Tensor, layout: PackedLayout
    ) -> torch.Tensor:
        """Attend in both directions within each packed sequence; return [N, Q * D]."""

    def product(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> Product | None:
        """Return the linear layer in a layout that is multiplied faster; None where there is none."""

    def rms_norm(self, x_NE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
        """Return x / sqrt(mean(x^2) + eps) * weight, row by row."""

    def layer_norm(self, x_NE: torch.Tensor, weight_E: torch.Tensor, bias_E: torch.Tensor, eps: float) -> torch.Tensor:
        """Return (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias, row by row."""

    def normalise(
        self, pixels_NI: torch.Tensor, mean_C: torch.Tensor, std_C: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return (x - mean) / std of uint8 values, as many of each channel, in float32 and rounded to *dtype*."""

    def norm_rotate(
        self, x_NHD: torch.Tensor, weight_MD: torch.Tensor, eps: float, turn: Turn, num_kv_heads: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm the first M heads of each row, turn them as `rotate` does, and return queries and keys, K of M."""

    def rotate_pairs(
        self, x_NHD: torch.Tensor, turn_N1C: torch.Tensor, num_heads: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn queries and keys, the first 2 Q heads of each row, as saccade.nn.rope.rotate_pairs does."""

    def gate(self, x_NI: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up [N, I / 2] of rows that hold I / 2 gates and then as many ups."""


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """One step as every layer sees it. *positions* int64 [3, N]: time, height and width of each token.

    Raises ValueError for positions of another shape, which a gather along the axes would take without a word.
    """

    positions: torch.Tensor
    layout: PagedLayout
    kv_caches: Sequence[KvCache]
    backend: Backend
    plan: Any

    def __post_init__(self) -> None:
        """Compare shapes, which the host knows; once a step."""
        num_tokens = self.layout.slot_mapping.shape[0]
        if self.positions.shape != (3, num_tokens):
            raise ValueError(f"Positions of {num_tokens} tokens are [3, {num_tokens}], not {[*self.positions.shape]}.")

"""What PyTorch's attention is given beside a CPU: on torch's meta device, whose tensors have no values."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention import BATCHES, BLOCK, DIM, HEADS, KV_HEADS, OPTIONS, assert_close, attend
from tables import table

from saccade.nn.backends import torch_sdpa
from saccade.nn.backends.torch_sdpa import AttentionBackend, SdpaPlan
from saccade.nn.context import ForwardContext, KvCache, PagedLayout, Scoring

META = torch.device("meta")
LOWER_RIGHT = "the queries are the last tokens"


class WithoutMasks(AttentionBackend):
    """As on a GPU, the masks of chunks behind a prefix are left to PyTorch."""

    def plan(self, layout: PagedLayout, dtype: torch.dtype) -> SdpaPlan:
        plan = super().plan(layout, dtype)
        return replace(plan, prefills=tuple(replace(chunk, mask=None) for chunk in plan.prefills))


@table("options", [{}, *OPTIONS])
@table(("queries", "contexts"), BATCHES)
def test_chunk_behind_a_prefix_needs_no_mask(
    queries: list[int], contexts: list[int], options: dict[str, float]
) -> None:
    assert_close(*attend(WithoutMasks(), queries, contexts, torch.float32, options=options))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The calls of PyTorch's attention."""
    found: list[dict[str, Any]] = []

    def record(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        found.append({"heads": (q.shape[1], k.shape[1], v.shape[1]), **options})
        return q.new_empty(*q.shape[:3], v.shape[3])

    monkeypatch.setattr(torch_sdpa.functional, "scaled_dot_product_attention", record)
    monkeypatch.setattr("torch.nn.attention.bias.causal_lower_right", lambda *_: LOWER_RIGHT)
    return found


def attend_beside_a_cpu(num_queries: int, context: int, dtype: torch.dtype, width: int = DIM, **options: Any) -> None:
    """Plan and attend with one prefill chunk."""
    num_blocks = -(-context // BLOCK)
    slots = torch.arange(num_queries, device=META)
    table = torch.arange(num_blocks, device=META).unsqueeze(0)
    lengths = torch.full((1,), context, device=META)
    layout = PagedLayout(slots, table, lengths, (num_queries,), (context,), 0, BLOCK, torch.zeros(1, device=META))
    keys, values = (torch.zeros(num_blocks, BLOCK, KV_HEADS, size, dtype=dtype, device=META) for size in (DIM, width))
    q, k, v = (
        torch.zeros(num_queries, heads, size, dtype=dtype, device=META)
        for heads, size in ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, width))
    )
    backend = AttentionBackend()
    step = ForwardContext(
        torch.zeros(3, num_queries, device=META), layout, [KvCache(keys, values)], backend, backend.plan(layout, dtype)
    )
    backend.paged(q, k, v, 0, step, Scoring(**options))


HALF, FLOAT = torch.bfloat16, torch.float32


def test_heads_stay_grouped_only_where_flash_attention_takes_them(calls: list[dict[str, Any]]) -> None:
    """Else PyTorch would compute all scores at once: in float32, for each head, query and token of the context."""
    table: list[tuple[dict[str, Any], bool]] = [
        ({"num_queries": 6, "context": 6, "dtype": HALF}, True),
        ({"num_queries": 6, "context": 40, "dtype": HALF}, True),
        ({"num_queries": 6, "context": 6, "dtype": FLOAT}, False),
        ({"num_queries": 6, "context": 40, "dtype": FLOAT}, False),
        ({"num_queries": 6, "context": 40, "dtype": HALF, "window": 5}, False),
        ({"num_queries": 6, "context": 6, "dtype": HALF, "width": 12}, False),
    ]
    for step, is_grouped in table:
        attend_beside_a_cpu(**step)
        call = calls.pop()
        kept = KV_HEADS if is_grouped else HEADS
        assert call["heads"] == (HEADS, kept, kept), step
        assert call["enable_gqa"] is is_grouped, step


def test_a_chunk_behind_a_prefix_has_no_dense_mask(calls: list[dict[str, Any]]) -> None:
    """A mask would have a byte, and then a value of the network's dtype, for each query and token of the context."""
    attend_beside_a_cpu(6, 40, HALF)
    assert (calls[0]["attn_mask"], calls[0]["is_causal"]) == (LOWER_RIGHT, False)

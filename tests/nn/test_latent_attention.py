"""Attention over cached latents against the same in float64, and against attention with unabsorbed keys and values."""

from typing import NamedTuple

import pytest
import torch
from attention import BATCHES
from tables import table

from saccade.nn.backends import AUTO, load_backend
from saccade.nn.context import ForwardContext, KvCache, LatentCache, PagedLayout

HEADS, WIDTH, ROPE, BLOCK, SCALE = 5, 12, 4, 4, 0.3
CHANNELS = WIDTH + ROPE


class Step(NamedTuple):
    """A step's layout, the slots of every sequence's whole context, and a cache that is NaN in all other places."""

    layout: PagedLayout
    slots: list[torch.Tensor]
    cache: torch.Tensor


def step(queries: list[int], contexts: list[int], dtype: torch.dtype) -> Step:
    blocks_of = [-(-length // BLOCK) for length in contexts]
    order = torch.randperm(sum(blocks_of), generator=torch.Generator().manual_seed(1)) + 1
    tables = torch.zeros(len(queries), max(blocks_of), dtype=torch.int64)
    slots = []
    for row, (blocks, context) in enumerate(zip(order.split(blocks_of), contexts, strict=True)):
        tables[row, : len(blocks)] = blocks
        slots.append((blocks.unsqueeze(1) * BLOCK + torch.arange(BLOCK)).flatten()[:context])
    layout = PagedLayout(
        slot_mapping=torch.cat([own[-length:] for own, length in zip(slots, queries, strict=True)]),
        block_tables=tables,
        context_lengths=torch.tensor(contexts),
        query_lengths=tuple(queries),
        host_context_lengths=tuple(contexts),
        num_decodes=sum(length == 1 for length in queries),
        block_size=BLOCK,
        rows=torch.arange(len(queries)),
    )
    cache = torch.full((1 + sum(blocks_of), BLOCK, CHANNELS), float("nan"), dtype=dtype)
    return Step(layout, slots, cache)


def attend(made: Step, q_NQC: torch.Tensor, latents: list[torch.Tensor]) -> torch.Tensor:
    """What the backend makes of a step whose earlier latents are cached."""
    queries = made.layout.query_lengths
    for own, latent, length in zip(made.slots, latents, queries, strict=True):
        made.cache.flatten(0, 1)[own[:-length]] = latent[:-length]
    backend = load_backend(AUTO)
    plan = backend.plan(made.layout, q_NQC.dtype)
    positions = torch.zeros(3, len(q_NQC), dtype=torch.int64)
    context = ForwardContext(positions, made.layout, [LatentCache(made.cache)], backend, plan)
    new = torch.cat([latent[-length:] for latent, length in zip(latents, queries, strict=True)])
    return backend.latent(q_NQC, new, 0, context, value_width=WIDTH, scale=SCALE)


def draw(queries: list[int], contexts: list[int], dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    q_NQC = torch.randn(sum(queries), HEADS, CHANNELS, generator=generator).to(dtype)
    return q_NQC, [torch.randn(context, CHANNELS, generator=generator).to(dtype) for context in contexts]


def reference(q_nQD: torch.Tensor, k_LQD: torch.Tensor, v_LQW: torch.Tensor) -> torch.Tensor:
    """Attention of the last n of L tokens in float64; returns [n, Q, W]."""
    scores_QnL = torch.einsum("nqd,lqd->qnl", q_nQD.double(), k_LQD.double()) * SCALE
    key, query = torch.arange(len(k_LQD)), torch.arange(len(k_LQD) - len(q_nQD), len(k_LQD)).unsqueeze(1)
    shares = scores_QnL.masked_fill(key > query, float("-inf")).softmax(-1)
    return torch.einsum("qnl,lqw->nqw", shares, v_LQW.double())


@table("dtype", [torch.float32, torch.bfloat16])
@table(("queries", "contexts"), BATCHES)
def test_latent_attention(queries: list[int], contexts: list[int], dtype: torch.dtype) -> None:  # [eng] 41
    made = step(queries, contexts, dtype)
    q_NQC, latents = draw(queries, contexts, dtype)
    output = attend(made, q_NQC, latents)
    assert output.shape == (sum(queries), HEADS, WIDTH)
    expected = [
        reference(q, latent[:, None].expand(-1, HEADS, -1), latent[:, None, :WIDTH].expand(-1, HEADS, -1))
        for q, latent in zip(q_NQC.split(queries), latents, strict=True)
    ]
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(output.double(), torch.cat(expected), atol=tolerance, rtol=tolerance)
    for own, latent in zip(made.slots, latents, strict=True):
        assert torch.equal(made.cache.flatten(0, 1)[own], latent)


@table(("queries", "contexts"), BATCHES)
def test_absorbed_queries_attend_as_keys_made_of_latents(queries: list[int], contexts: list[int]) -> None:
    generator = torch.Generator().manual_seed(2)
    to_keys_QKW = torch.randn(HEADS, 6, WIDTH, generator=generator)
    to_values_QVW = torch.randn(HEADS, 7, WIDTH, generator=generator)
    q_NQK = torch.randn(sum(queries), HEADS, 6, generator=generator)
    q_NQC, latents = draw(queries, contexts, torch.float32)
    turned_NQR = q_NQC[..., WIDTH:]
    absorbed = torch.cat((torch.einsum("nqk,qkw->nqw", q_NQK, to_keys_QKW), turned_NQR), -1)
    attended = attend(step(queries, contexts, torch.float32), absorbed, latents)
    output = torch.einsum("nqw,qvw->nqv", attended, to_values_QVW)
    expected = []
    for q, turned, latent in zip(q_NQK.split(queries), turned_NQR.split(queries), latents, strict=True):
        keys = torch.einsum("lw,qkw->lqk", latent[:, :WIDTH], to_keys_QKW)
        keys = torch.cat((keys, latent[:, None, WIDTH:].expand(-1, HEADS, -1)), -1)
        values = torch.einsum("lw,qvw->lqv", latent[:, :WIDTH], to_values_QVW)
        expected.append(reference(torch.cat((q, turned), -1), keys, values))
    torch.testing.assert_close(output.double(), torch.cat(expected), atol=1e-4, rtol=1e-4)


def test_a_cache_of_another_kind_is_refused() -> None:
    made = step([1], [1], torch.float32)
    backend = load_backend(AUTO)
    cache = KvCache(made.cache, made.cache)
    context = ForwardContext(torch.zeros(3, 1), made.layout, [cache], backend, backend.plan(made.layout, torch.float32))
    with pytest.raises(TypeError, match="Layer 0 has a KvCache, not a LatentCache"):
        context.latent_cache(0)

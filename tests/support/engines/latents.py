"""Steps of attention over cached latents, and the same in float64."""

from typing import NamedTuple

import torch

from saccade.nn.context import AttentionBackend, ForwardContext, LatentCache, PagedLayout

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


def attend(backend: AttentionBackend, made: Step, q_NQC: torch.Tensor, latents: list[torch.Tensor]) -> torch.Tensor:
    """What *backend* makes of a step whose earlier latents are cached."""
    queries = made.layout.query_lengths
    for own, latent, length in zip(made.slots, latents, queries, strict=True):
        made.cache.flatten(0, 1)[own[:-length]] = latent[:-length]
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

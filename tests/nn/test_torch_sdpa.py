"""The reference backend against attention written out."""

import pytest
import torch

from saccade.errors import StartupError
from saccade.nn.backends import load_backend
from saccade.nn.context import ForwardContext, KvCache, PackedLayout, PagedLayout

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 8, 4


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Attention of q [n, Q, D] over k, v [l, K, D], whose last n tokens are the queries'."""
    k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], 1) for tensor in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q, k) / q.shape[-1] ** 0.5
    if causal:
        hidden = torch.ones(scores.shape[1:]).tril(k.shape[0] - q.shape[0]) == 0
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.einsum("hnl,lhd->nhd", scores.softmax(-1), v).flatten(1)


@pytest.mark.parametrize(
    ("queries", "contexts"),
    [
        ([1], [1]),
        ([1, 1, 1], [9, 3, 5]),
        ([1, 1, 1], [5, 600, 1200]),  # several decode groups
        ([6, 5], [6, 12]),  # a fresh prefill and one behind a cached prefix
        ([1, 1, 7, 4], [30, 2, 7, 40]),
    ],
)
def test_paged(queries: list[int], contexts: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    total, num_decodes = sum(queries), sum(length == 1 for length in queries)
    blocks_of = [-(-length // BLOCK) for length in contexts]
    tables = torch.zeros(len(queries), max(blocks_of), dtype=torch.int64)
    # Everything that is not a sequence's own is NaN: nothing of it may reach an output. [eng] 41
    cache = KvCache(*(torch.full((1 + sum(blocks_of), BLOCK, KV_HEADS, DIM), float("nan")) for _ in range(2)))
    order = torch.randperm(sum(blocks_of), generator=generator) + 1
    q = torch.randn(total, HEADS, DIM, generator=generator)
    slots, expected, keys, values, cursor = [], [], [], [], 0
    for row, (length, context) in enumerate(zip(queries, contexts, strict=True)):
        table = order[sum(blocks_of[:row]) :][: blocks_of[row]]
        tables[row, : len(table)] = table
        own = (table.unsqueeze(1) * BLOCK + torch.arange(BLOCK)).flatten()[:context]
        k, v = torch.randn(2, context, KV_HEADS, DIM, generator=generator).unbind(0)
        cache.keys.flatten(0, 1)[own[:-length]] = k[:-length]
        cache.values.flatten(0, 1)[own[:-length]] = v[:-length]
        slots.append(own[-length:])
        keys.append(k[-length:])
        values.append(v[-length:])
        expected.append(plain(q[cursor : cursor + length], k, v, causal=True))
        cursor += length
    layout = PagedLayout(
        torch.cat(slots), tables, torch.tensor(contexts), tuple(queries), tuple(contexts), num_decodes, BLOCK
    )
    backend = load_backend("torch_sdpa")
    plan = backend.plan(layout, torch.float32)
    context = ForwardContext(torch.zeros(3, total, dtype=torch.int64), layout, [cache], backend, plan)
    output = backend.paged(q, torch.cat(keys), torch.cat(values), 0, context)
    torch.testing.assert_close(output, torch.cat(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize("lengths", [(6,), (4, 4, 4), (3, 8, 1)])
def test_packed(lengths: tuple[int, ...]) -> None:
    q, k, v = torch.randn(3, sum(lengths), HEADS, DIM, generator=torch.Generator().manual_seed(0)).unbind(0)
    borders = torch.tensor([0, *lengths]).cumsum(0).int()
    output = load_backend("torch_sdpa").packed(q, k, v, PackedLayout(borders, max(lengths), lengths))
    parts = zip(*(tensor.split(lengths) for tensor in (q, k, v)), strict=True)
    expected = torch.cat([plain(*part, causal=False) for part in parts])
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=0)


def test_unknown_backend_names_the_known() -> None:
    with pytest.raises(StartupError, match="torch_sdpa"):
        load_backend("nonesuch")

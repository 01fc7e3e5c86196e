"""Steps of attention over a paged cache, and of vision towers, beside the same in float64."""

import torch

from saccade.nn.cache_values import CacheValues
from saccade.nn.context import (
    AttentionBackend,
    ForwardContext,
    KvCache,
    PackedLayout,
    PagedLayout,
    Scoring,
    VisionAttentionBackend,
)

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 8, 4


def assert_close(output: torch.Tensor, expected: torch.Tensor, ulps: float = 1) -> None:
    """*expected* was computed in float64; values are of about 1."""
    tolerance = {torch.float32: 1e-5, torch.float16: 2**-10 * ulps, torch.bfloat16: 2**-8 * ulps}[output.dtype]
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    horizons: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention in float64 of q [n, Q, D] over k, v [l, K, D], whose last n tokens are the queries'."""
    q, k, v = (tensor.double() for tensor in (q, k, v))
    k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], 1) for tensor in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if soft_cap is not None:
        scores = soft_cap * (scores / soft_cap).tanh()
    key, query = torch.arange(len(k)), torch.arange(len(k) - len(q), len(k)).unsqueeze(1)
    if causal:
        ends = query + 1 if horizons is None else horizons.unsqueeze(1)
        scores = scores.masked_fill(key >= ends, float("-inf"))
    if window is not None:
        scores = scores.masked_fill(key <= query - window, float("-inf"))
    return torch.einsum("hnl,lhd->nhd", scores.softmax(-1), v).flatten(1)


BATCHES = [
    ([1], [1]),
    ([1, 1, 1], [9, 3, 5]),
    ([1, 1, 1], [5, 600, 1200]),  # several decode groups
    ([6, 5], [6, 12]),  # a fresh prefill and one behind a cached prefix
    ([1, 1, 7, 4], [30, 2, 7, 40]),
    ([150, 40], [150, 300]),
]
OPTIONS: list[dict[str, float]] = [
    {"scale": 0.1},
    {"window": 1},
    {"window": 4},
    {"soft_cap": 0.5},
    {"scale": 2.0, "window": 5, "soft_cap": 3.0},
]


def rounded(values: torch.Tensor, scale: float) -> torch.Tensor:
    """What float8 makes of values."""
    return ((values.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(values.dtype)


def attend(
    backend: AttentionBackend,
    queries: list[int],
    contexts: list[int],
    dtype: torch.dtype,
    value_width: int = DIM,
    options: dict[str, float] | None = None,
    dim: int = DIM,
    scales: tuple[float, float] | None = None,
    image: tuple[int, int] | None = None,
    heads: tuple[int, int] = (HEADS, KV_HEADS),
) -> tuple[torch.Tensor, torch.Tensor]:
    """What *backend* makes of one step, and what it should. With *scales* the cache has float8.

    *heads* are those of queries, and of keys and values. Tokens [start, stop) of each longer context are an *image*,
    whose tokens see each other.
    """
    options = options or {}
    generator = torch.Generator().manual_seed(0)
    total, num_decodes = sum(queries), sum(length == 1 for length in queries)
    blocks_of = [-(-length // BLOCK) for length in contexts]
    tables = torch.zeros(len(queries), max(blocks_of), dtype=torch.int64)
    # Everything that is not a sequence's own is NaN: nothing of it may reach an output.
    shape = (1 + sum(blocks_of), BLOCK, heads[1])
    cache = KvCache(*(torch.full((*shape, width), float("nan"), dtype=dtype) for width in (dim, value_width)))
    if scales is not None:
        cache = KvCache(cache.keys.to(torch.float8_e4m3fn), cache.values.to(torch.float8_e4m3fn), *scales)
    order = torch.randperm(sum(blocks_of), generator=generator) + 1
    q = torch.randn(total, heads[0], dim, generator=generator).to(dtype)
    slots, expected, keys, values, horizons, cursor = [], [], [], [], [], 0
    for row, (length, context) in enumerate(zip(queries, contexts, strict=True)):
        table = order[sum(blocks_of[:row]) :][: blocks_of[row]]
        tables[row, : len(table)] = table
        own = (table.unsqueeze(1) * BLOCK + torch.arange(BLOCK)).flatten()[:context]
        k, v = (torch.randn(context, heads[1], width, generator=generator).to(dtype) for width in (dim, value_width))
        CacheValues(cache.keys.flatten(0, 1), cache.key_scale).write(own[:-length], k[:-length])
        CacheValues(cache.values.flatten(0, 1), cache.value_scale).write(own[:-length], v[:-length])
        slots.append(own[-length:])
        keys.append(k[-length:])
        values.append(v[-length:])
        if scales is not None:
            k, v = rounded(k, scales[0]), rounded(v, scales[1])
        ends = torch.arange(context) + 1
        if image is not None and image[1] <= context:
            ends[slice(*image)] = image[1]
        horizons.append(ends[-length:])
        scored = reference(q[cursor : cursor + length], k, v, causal=True, horizons=horizons[-1], **options)  # type: ignore[arg-type]
        expected.append(scored)
        cursor += length
    layout = PagedLayout(
        torch.cat(slots),
        tables,
        torch.tensor(contexts),
        tuple(queries),
        tuple(contexts),
        num_decodes,
        BLOCK,
        torch.arange(len(queries)),
        horizons=None if image is None else torch.cat(horizons),
    )
    plan = backend.plan(layout, dtype)
    context = ForwardContext(torch.zeros(3, total, dtype=torch.int64), layout, [cache], backend, plan)
    scoring = Scoring(looks_ahead=image is not None, **options)  # type: ignore[arg-type]
    output = backend.paged(q, torch.cat(keys), torch.cat(values), 0, context, scoring)
    return output, torch.cat(expected)


def attend_packed(
    backend: VisionAttentionBackend,
    lengths: tuple[int, ...],
    dtype: torch.dtype,
    scale: float | None = None,
    dim: int = DIM,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What *backend* makes of sequences of *lengths*, in tensors with gaps as a tower has them, and what it should."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(sum(lengths), 3 * HEADS, dim, generator=generator).to(dtype)
    q, k, v = qkv.chunk(3, dim=1)
    borders = torch.tensor([0, *lengths]).cumsum(0).int()
    output = backend.packed((q, k, v), PackedLayout(borders, max(lengths), lengths), scale)
    parts = zip(*(tensor.split(lengths) for tensor in (q, k, v)), strict=True)
    return output, torch.cat([reference(*part, causal=False, scale=scale) for part in parts])


class CapturedDecodes:
    """One layer's decodes over buffers that never move, as a CUDA graph has them, by *backend*; heads of 64 channels."""

    def __init__(self, backend: AttentionBackend, dtype: torch.dtype, num_rows: int, num_blocks: int) -> None:
        self.backend, self.dtype, width = backend, dtype, 64
        draw = torch.Generator().manual_seed(3)
        shape = (1 + num_rows * num_blocks, BLOCK, KV_HEADS, width)
        self.cache = KvCache(*(torch.randn(shape, generator=draw).to(dtype) for _ in range(2)))
        self.tables = torch.randperm(num_rows * num_blocks, generator=draw).view(num_rows, num_blocks) + 1
        self.slots, self.lengths = (torch.zeros(num_rows, dtype=torch.int64) for _ in range(2))
        self.q, self.k, self.v = (
            torch.randn(num_rows, heads, width, generator=draw).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        first = self._layout([1] * num_rows)
        plan = backend.plan_captured(first, dtype)
        positions = torch.zeros(3, num_rows, dtype=torch.int64)
        self.context = ForwardContext(positions, first, [self.cache], backend, plan)
        self._compute()  # as before a capture

    def step(self, contexts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """What a replay computes after *contexts*, and what it should."""
        layout = self._layout(contexts)
        self.backend.replan(self.context.plan, layout)
        output, expected = self._compute(), []
        for row, length in enumerate(contexts):
            keys, values = (part[self.tables[row]].flatten(0, 1)[:length] for part in self.cache[:2])
            expected.append(reference(self.q[row : row + 1], keys, values, causal=True))
        return output, torch.cat(expected)

    def _layout(self, contexts: list[int]) -> PagedLayout:
        last = torch.tensor(contexts) - 1
        places = self.tables.gather(1, (last // BLOCK).unsqueeze(1)).squeeze(1) * BLOCK + last % BLOCK
        self.slots.copy_(places)
        self.lengths.copy_(last + 1)
        count = len(contexts)
        rows = torch.arange(count)
        return PagedLayout(self.slots, self.tables, self.lengths, (1,) * count, tuple(contexts), count, BLOCK, rows)

    def _compute(self) -> torch.Tensor:
        return self.backend.paged(self.q, self.k, self.v, 0, self.context)

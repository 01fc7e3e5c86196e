"""Attention backends at the shapes of real models, over unequal lengths, against float32 over the same values."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from benchmarks.gpu.checks import failure
from benchmarks.gpu.device_time import device_seconds
from benchmarks.gpu.plan import FAILED, PASSED, Row
from benchmarks.gpu.scale import Scale
from saccade.nn.backends import PLAIN, Workload, load_backend
from saccade.nn.context import SCALED, ForwardContext, KvCache, PagedLayout

BLOCK_SIZE = 16
LARGEST_ERROR = {torch.bfloat16: 2e-2, torch.float32: 1e-5}
"""||result - float32|| / ||float32||: the result and what it is made of are rounded to bfloat16."""


class Heads(NamedTuple):
    """Query heads, heads of keys and values, and channels of each."""

    num_heads: int
    num_kv_heads: int
    size: int


class Lengths(NamedTuple):
    """The tokens of each sequence's context, and those of this step, which it ends with; single tokens come first."""

    name: str
    contexts: tuple[int, ...]
    queries: tuple[int, ...]


REAL_HEADS = (Heads(32, 8, 128), Heads(16, 8, 128), Heads(16, 2, 256), Heads(16, 16, 64))
UNEQUAL = (1, 15, 16, 17, 33, 500, 511, 512, 513, 1000, 4097, 9000)
REAL_LENGTHS = (
    Lengths("12 decodes of unequal lengths", UNEQUAL, (1,) * len(UNEQUAL)),
    Lengths("a decode after 32,768", (32768,), (1,)),
    Lengths("64 decodes after 4,096", tuple(4096 + row for row in range(64)), (1,) * 64),
    Lengths("5 prompts up to 1,220", (2, 16, 17, 700, 1220), (2, 16, 17, 700, 1220)),
    Lengths("3 chunks after prefixes", (300, 4000, 5000), (100, 17, 1000)),
    Lengths("decodes, a prompt and a chunk", (40, 800, 1220, 3000), (1, 1, 1220, 500)),
)
SMALL_HEADS = (Heads(4, 2, 16),)
SMALL_LENGTHS = (
    Lengths("4 decodes of unequal lengths", (1, 15, 16, 17), (1,) * 4),
    Lengths("decodes, a prompt and a chunk", (20, 30, 12, 40), (1, 1, 12, 5)),
)


def attention(scale: Scale) -> Iterator[Row]:
    """Compare and time each backend of the text decoder."""
    is_gpu = scale.device == "cuda"
    for heads in REAL_HEADS if is_gpu else SMALL_HEADS:
        for lengths in REAL_LENGTHS if is_gpu else SMALL_LENGTHS:
            yield from _attention_rows(scale, heads, lengths)


def _attention_rows(scale: Scale, heads: Heads, lengths: Lengths) -> Iterator[Row]:
    device, dtype = torch.device(scale.device), getattr(torch, scale.dtype)
    layout, num_blocks = _layout(lengths, device)
    draw = torch.Generator(device).manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, device=device).to(dtype)

    cache = KvCache(*(random(num_blocks, BLOCK_SIZE, heads.num_kv_heads, heads.size) for _ in range(2)))
    queries = random(sum(lengths.queries), heads.num_heads, heads.size)
    own = _own(cache, layout)
    positions = torch.zeros(3, len(queries), dtype=torch.int64, device=device)
    exact = KvCache(cache.keys.float(), cache.values.float())
    plain = load_backend(PLAIN, Workload(device, torch.float32))
    context = ForwardContext(positions, layout, [exact], plain, plain.plan(layout, torch.float32))
    expected = plain.attend(queries.float(), _own(exact, layout), exact, context, SCALED)
    num_bytes = 2 * sum(lengths.contexts) * heads.num_kv_heads * heads.size * dtype.itemsize
    for name in scale.decoders:
        label = f"{heads.num_heads}/{heads.num_kv_heads} heads of {heads.size}, {lengths.name}, {name}"
        try:
            backend = load_backend(name, Workload(device, dtype, head_sizes=frozenset({(heads.size, heads.size)})))
            context = ForwardContext(positions, layout, [cache], backend, backend.plan(layout, dtype))
            actual = backend.attend(queries, own, cache, context, SCALED).float()
            error = float((actual - expected).norm() / expected.norm())
            seconds = device_seconds(lambda: backend.attend(queries, own, cache, context, SCALED), scale.repeats)  # noqa: B023
        except Exception as problem:
            yield failure(label, problem)
            continue
        # A NaN is not at most anything.
        result = PASSED if error <= LARGEST_ERROR[dtype] else FAILED
        rate = num_bytes / seconds / 1e12
        yield Row(label, result, f"off by {error:.1e}; {seconds * 1e6:.0f} us, {rate:.2f} TB/s of keys and values")


def _layout(lengths: Lengths, device: torch.device) -> tuple[PagedLayout, int]:
    """Return sequences in shuffled blocks, and the number of blocks."""
    counts = [-(-context // BLOCK_SIZE) for context in lengths.contexts]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(5)).tolist()
    tables = torch.zeros(len(counts), max(counts), dtype=torch.int64)
    slots: list[int] = []
    first = 0
    for row, (context, query, count) in enumerate(zip(lengths.contexts, lengths.queries, counts, strict=True)):
        own = order[first : first + count]
        tables[row, :count] = torch.tensor(own)
        slots += (
            own[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE for place in range(context - query, context)
        )
        first += count
    num_decodes = next((row for row, query in enumerate(lengths.queries) if query > 1), len(counts))
    layout = PagedLayout(
        slot_mapping=torch.tensor(slots, device=device),
        block_tables=tables.to(device),
        context_lengths=torch.tensor(lengths.contexts, device=device),
        query_lengths=lengths.queries,
        host_context_lengths=lengths.contexts,
        num_decodes=num_decodes,
        block_size=BLOCK_SIZE,
        rows=torch.arange(len(counts), device=device),
    )
    return layout, sum(counts)


def _own(cache: KvCache, layout: PagedLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of the step's own tokens, which the cache has already."""
    keys, values = (part.flatten(0, 1).index_select(0, layout.slot_mapping) for part in (cache.keys, cache.values))
    return keys, values

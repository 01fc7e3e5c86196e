"""Every attention backend against the same in float64, and which of them is chosen."""

import importlib
import sys

import pytest
import torch

from saccade.errors import StartupError
from saccade.nn.backends import AMX, AUTO, PLAIN, VISION_BACKENDS, load_backend, load_vision_backend
from saccade.nn.cache_values import CacheValues
from saccade.nn.context import (
    ForwardContext,
    KvCache,
    PackedLayout,
    PagedLayout,
    VisionAttentionBackend,
    check_metadata,
)

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 8, 4
BOTH = [torch.float32, torch.bfloat16]
CPU = torch.device("cpu")


def has_amx() -> bool:
    """Whether the backend by AMX is installed, and computes on this processor."""
    try:
        return importlib.import_module(VISION_BACKENDS[AMX]).unavailable(CPU, torch.bfloat16) is None
    except ImportError:
        return False


def assert_close(output: torch.Tensor, expected: torch.Tensor, ulps: float = 1) -> None:
    """*expected* was computed in float64; values are of about 1."""
    tolerance = 1e-5 if output.dtype == torch.float32 else 2**-8 * ulps
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)


needs_amx = pytest.mark.skipif(not has_amx(), reason="this processor has no AMX")
VISION_WITH_DTYPES = [
    (PLAIN, torch.float32),
    (PLAIN, torch.bfloat16),
    pytest.param(AMX, torch.bfloat16, marks=needs_amx),
]


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Attention in float64 of q [n, Q, D] over k, v [l, K, D], whose last n tokens are the queries'."""
    q, k, v = (tensor.double() for tensor in (q, k, v))
    k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], 1) for tensor in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if soft_cap is not None:
        scores = soft_cap * (scores / soft_cap).tanh()
    key, query = torch.arange(len(k)), torch.arange(len(k) - len(q), len(k)).unsqueeze(1)
    if causal:
        scores = scores.masked_fill(key > query, float("-inf"))
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


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize(("queries", "contexts"), BATCHES)
def test_paged(queries: list[int], contexts: list[int], dtype: torch.dtype) -> None:  # [eng] 41
    output, expected = attend(queries, contexts, dtype, DIM, {})
    assert_close(output, expected, ulps=2)


@pytest.mark.parametrize("value_width", [DIM, 12])
@pytest.mark.parametrize("options", [{}, *OPTIONS], ids=str)
@pytest.mark.parametrize(("queries", "contexts"), BATCHES)
def test_paged_with_options(
    queries: list[int], contexts: list[int], options: dict[str, float], value_width: int
) -> None:
    output, expected = attend(queries, contexts, torch.float32, value_width, options)
    assert output.shape == (sum(queries), HEADS * value_width)
    assert_close(output, expected)


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize(("queries", "contexts"), BATCHES)
def test_paged_over_float8(queries: list[int], contexts: list[int], dtype: torch.dtype) -> None:
    """Every token attends over keys and values as the cache gives them, also those of its own chunk."""
    output, expected = attend(queries, contexts, dtype, DIM, {}, scales=(0.25, 3.0))
    assert_close(output, expected, ulps=2)


def rounded(values: torch.Tensor, scale: float) -> torch.Tensor:
    """What float8 makes of values."""
    return ((values.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(values.dtype)


def attend(
    queries: list[int],
    contexts: list[int],
    dtype: torch.dtype,
    value_width: int,
    options: dict[str, float],
    scales: tuple[float, float] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the plain backend makes of one step, and what it should. With *scales* the cache has float8."""
    generator = torch.Generator().manual_seed(0)
    total, num_decodes = sum(queries), sum(length == 1 for length in queries)
    blocks_of = [-(-length // BLOCK) for length in contexts]
    tables = torch.zeros(len(queries), max(blocks_of), dtype=torch.int64)
    # Everything that is not a sequence's own is NaN: nothing of it may reach an output.
    shape = (1 + sum(blocks_of), BLOCK, KV_HEADS)
    cache = KvCache(*(torch.full((*shape, width), float("nan"), dtype=dtype) for width in (DIM, value_width)))
    if scales is not None:
        cache = KvCache(cache.keys.to(torch.float8_e4m3fn), cache.values.to(torch.float8_e4m3fn), *scales)
    order = torch.randperm(sum(blocks_of), generator=generator) + 1
    q = torch.randn(total, HEADS, DIM, generator=generator).to(dtype)
    slots, expected, keys, values, cursor = [], [], [], [], 0
    for row, (length, context) in enumerate(zip(queries, contexts, strict=True)):
        table = order[sum(blocks_of[:row]) :][: blocks_of[row]]
        tables[row, : len(table)] = table
        own = (table.unsqueeze(1) * BLOCK + torch.arange(BLOCK)).flatten()[:context]
        k, v = (torch.randn(context, KV_HEADS, width, generator=generator).to(dtype) for width in (DIM, value_width))
        CacheValues(cache.keys.flatten(0, 1), cache.key_scale).write(own[:-length], k[:-length])
        CacheValues(cache.values.flatten(0, 1), cache.value_scale).write(own[:-length], v[:-length])
        slots.append(own[-length:])
        keys.append(k[-length:])
        values.append(v[-length:])
        if scales is not None:
            k, v = rounded(k, scales[0]), rounded(v, scales[1])
        expected.append(reference(q[cursor : cursor + length], k, v, causal=True, **options))  # type: ignore[arg-type]
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
    )
    backend = load_backend(AUTO)
    plan = backend.plan(layout, dtype)
    context = ForwardContext(torch.zeros(3, total, dtype=torch.int64), layout, [cache], backend, plan)
    output = backend.paged(q, torch.cat(keys), torch.cat(values), 0, context, **options)  # type: ignore[arg-type]
    return output, torch.cat(expected)


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize(("name", "dtype"), VISION_WITH_DTYPES)
@pytest.mark.parametrize("lengths", [(6,), (4, 4, 4), (3, 8, 1), (150, 33), (5, 5, 2, 2, 2, 5)])
def test_packed(name: str, lengths: tuple[int, ...], dtype: torch.dtype, scale: float | None) -> None:
    q, k, v = torch.randn(3, sum(lengths), HEADS, DIM, generator=torch.Generator().manual_seed(0)).to(dtype).unbind(0)
    borders = torch.tensor([0, *lengths]).cumsum(0).int()
    backend = load_vision_backend(name, CPU, dtype)
    output = backend.packed(q, k, v, PackedLayout(borders, max(lengths), lengths), scale)
    parts = zip(*(tensor.split(lengths) for tensor in (q, k, v)), strict=True)
    assert_close(output, torch.cat([reference(*part, causal=False, scale=scale) for part in parts]), ulps=2)


def test_unknown_backends_name_the_known() -> None:
    with pytest.raises(StartupError, match="auto, torch_sdpa"):
        load_backend("nonesuch")
    with pytest.raises(StartupError, match="auto, torch_sdpa, amx"):
        load_vision_backend("nonesuch", CPU, torch.float32)


def test_auto_takes_amx_where_it_can_compute() -> None:
    assert load_backend(AUTO).name == PLAIN
    assert load_vision_backend(AUTO, CPU, torch.bfloat16).name == (AMX if has_amx() else PLAIN)
    assert load_vision_backend(AUTO, CPU, torch.float32).name == PLAIN
    assert load_vision_backend(AUTO, torch.device("cuda"), torch.bfloat16).name == PLAIN
    assert load_vision_backend(PLAIN, CPU, torch.bfloat16).name == PLAIN
    with pytest.raises(StartupError, match=r"cannot be amx: .*not in float32 on cpu"):
        load_vision_backend(AMX, CPU, torch.float32)


def test_without_the_processor_amx_is_refused_and_auto_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: False)
    assert load_vision_backend(AUTO, CPU, torch.bfloat16).name == PLAIN
    with pytest.raises(StartupError, match="cannot be amx: this processor has no AMX"):
        load_vision_backend(AMX, CPU, torch.bfloat16)


def test_without_its_folder_or_numba_amx_is_refused_and_auto_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, VISION_BACKENDS[AMX], None)
    assert load_vision_backend(AUTO, CPU, torch.bfloat16).name == PLAIN
    with pytest.raises(StartupError, match=r"cannot be amx: it is not installed .*saccade\[cpu\]"):
        load_vision_backend(AMX, CPU, torch.bfloat16)


class Borders:
    """A vision backend that reads borders on the device alone."""

    name = "borders"
    metadata = ("cu_seqlens",)

    def packed(self, *_: object) -> torch.Tensor:
        raise NotImplementedError


def test_missing_metadata_is_refused_before_the_launch() -> None:
    backend: VisionAttentionBackend = Borders()  # type: ignore[assignment]
    check_metadata(backend, PackedLayout(torch.tensor([0, 4]), 4, (4,)))
    with pytest.raises(ValueError, match="borders needs cu_seqlens"):
        check_metadata(backend, PackedLayout(None, 4, (4,)))  # type: ignore[arg-type]
    layout = PagedLayout(torch.zeros(1), None, torch.ones(1), (1,), (1,), 1, BLOCK, torch.zeros(1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="torch_sdpa needs block_tables"):
        ForwardContext(torch.zeros(3, 1), layout, [], load_backend(AUTO), None)

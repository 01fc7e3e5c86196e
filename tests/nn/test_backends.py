"""Every backend against what it computes, written out."""

import pytest
import torch

from saccade.errors import StartupError
from saccade.nn.backends import AUTO, BACKENDS, KERNELS, PLAIN, TILES, choose_backend, load_backend
from saccade.nn.context import ForwardContext, KvCache, PackedLayout, PagedLayout
from saccade.nn.kernels import tiles
from saccade.nn.rope import pair_rotation, rotation

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 8, 4
BOTH = [torch.float32, torch.bfloat16]


def assert_close(output: torch.Tensor, expected: torch.Tensor, ulps: float = 1) -> None:
    """*expected* was computed in float32 or better; values are of about 1."""
    assert expected.dtype != output.dtype or output.dtype == torch.float32
    tolerance = 1e-5 if output.dtype == torch.float32 else 2**-8 * ulps
    torch.testing.assert_close(output.float(), expected.float(), atol=tolerance, rtol=tolerance)


needs_tiles = pytest.mark.skipif(not tiles.available(), reason="this processor has no AMX")


@pytest.fixture(params=[PLAIN, KERNELS, pytest.param(TILES, marks=needs_tiles)])
def name(request: pytest.FixtureRequest) -> str:
    """The name of a backend."""
    return str(request.param)


WITH_DTYPES = [
    pytest.param(name, dtype, marks=[needs_tiles] if name == TILES else [])
    for name in BACKENDS
    for dtype in BOTH
    if (name, dtype) != (TILES, torch.float32)
]


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Attention of q [n, Q, D] over k, v [l, K, D], whose last n tokens are the queries'."""
    k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], 1) for tensor in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q, k) / q.shape[-1] ** 0.5
    if causal:
        hidden = torch.ones(scores.shape[1:]).tril(k.shape[0] - q.shape[0]) == 0
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.einsum("hnl,lhd->nhd", scores.softmax(-1), v).flatten(1)


@pytest.mark.parametrize(("name", "dtype"), WITH_DTYPES)
@pytest.mark.parametrize(
    ("queries", "contexts"),
    [
        ([1], [1]),
        ([1, 1, 1], [9, 3, 5]),
        ([1, 1, 1], [5, 600, 1200]),  # several decode groups
        ([6, 5], [6, 12]),  # a fresh prefill and one behind a cached prefix
        ([1, 1, 7, 4], [30, 2, 7, 40]),
        ([150, 40], [150, 300]),
    ],
)
def test_paged(name: str, queries: list[int], contexts: list[int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    total, num_decodes = sum(queries), sum(length == 1 for length in queries)
    blocks_of = [-(-length // BLOCK) for length in contexts]
    tables = torch.zeros(len(queries), max(blocks_of), dtype=torch.int64)
    # Everything that is not a sequence's own is NaN: nothing of it may reach an output. [eng] 41
    shape = (1 + sum(blocks_of), BLOCK, KV_HEADS, DIM)
    cache = KvCache(*(torch.full(shape, float("nan"), dtype=dtype) for _ in range(2)))
    order = torch.randperm(sum(blocks_of), generator=generator) + 1
    q = torch.randn(total, HEADS, DIM, generator=generator).to(dtype)
    slots, expected, keys, values, cursor = [], [], [], [], 0
    for row, (length, context) in enumerate(zip(queries, contexts, strict=True)):
        table = order[sum(blocks_of[:row]) :][: blocks_of[row]]
        tables[row, : len(table)] = table
        own = (table.unsqueeze(1) * BLOCK + torch.arange(BLOCK)).flatten()[:context]
        k, v = torch.randn(2, context, KV_HEADS, DIM, generator=generator).to(dtype).unbind(0)
        cache.keys.flatten(0, 1)[own[:-length]] = k[:-length]
        cache.values.flatten(0, 1)[own[:-length]] = v[:-length]
        slots.append(own[-length:])
        keys.append(k[-length:])
        values.append(v[-length:])
        expected.append(plain(q[cursor : cursor + length].float(), k.float(), v.float(), causal=True))
        cursor += length
    layout = PagedLayout(
        torch.cat(slots), tables, torch.tensor(contexts), tuple(queries), tuple(contexts), num_decodes, BLOCK
    )
    backend = load_backend(name)
    backend.use_caches([cache])
    plan = backend.plan(layout, dtype)
    context = ForwardContext(torch.zeros(3, total, dtype=torch.int64), layout, [cache], backend, plan)
    output = backend.paged(q, torch.cat(keys), torch.cat(values), 0, context)
    assert_close(output, torch.cat(expected), ulps=2)


@pytest.mark.parametrize("num_rows", [1, 5])
def test_decode_in_parts(monkeypatch: pytest.MonkeyPatch, num_rows: int) -> None:
    """What several threads share is what one computes."""
    monkeypatch.setattr("saccade.nn.backends.numba_cpu.PART_BYTES", 64)
    generator = torch.Generator().manual_seed(0)
    cache = KvCache(*torch.randn(2, 40, BLOCK, KV_HEADS, DIM, generator=generator).unbind(0))
    tables = torch.randperm(40, generator=generator)[: num_rows * 8].view(num_rows, 8)
    lengths = tuple(range(32, 32 - num_rows, -1))
    layout = PagedLayout(
        torch.zeros(num_rows), tables, torch.tensor(lengths), (1,) * num_rows, lengths, num_rows, BLOCK
    )
    q = torch.randn(num_rows, HEADS, DIM, generator=generator)
    before, outputs = torch.get_num_threads(), []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        backend = load_backend(KERNELS, num_threads)
        backend.use_caches([cache])
        plan = backend.plan(layout, q.dtype)
        context = ForwardContext(torch.zeros(3, num_rows, dtype=torch.int64), layout, [cache], backend, plan)
        outputs.append(backend.decode(q, 0, context))  # type: ignore[attr-defined]
    torch.set_num_threads(before)
    torch.testing.assert_close(outputs[1], outputs[0], atol=0, rtol=0)
    torch.testing.assert_close(outputs[2], outputs[0], atol=0, rtol=0)


@pytest.mark.parametrize(("name", "dtype"), WITH_DTYPES)
@pytest.mark.parametrize("lengths", [(6,), (4, 4, 4), (3, 8, 1), (150, 33)])
def test_packed(name: str, lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    q, k, v = torch.randn(3, sum(lengths), HEADS, DIM, generator=torch.Generator().manual_seed(0)).to(dtype).unbind(0)
    borders = torch.tensor([0, *lengths]).cumsum(0).int()
    output = load_backend(name).packed(q, k, v, PackedLayout(borders, max(lengths), lengths))
    parts = zip(*(tensor.float().split(lengths) for tensor in (q, k, v)), strict=True)
    expected = torch.cat([plain(*part, causal=False) for part in parts])
    assert_close(output, expected, ulps=2)


@needs_tiles
@pytest.mark.parametrize("num_heads", [1, 3])
def test_packed_in_parts(monkeypatch: pytest.MonkeyPatch, num_heads: int) -> None:
    """What several threads share is what one computes."""
    monkeypatch.setattr("saccade.nn.backends.amx.PART_SCORES", 1)
    q, k, v = torch.randn(3, 40, num_heads, 16, generator=torch.Generator().manual_seed(0)).bfloat16().unbind(0)
    layout = PackedLayout(torch.tensor([0, 30, 40]), 30, (30, 10))
    before, outputs = torch.get_num_threads(), []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        outputs.append(load_backend(TILES, num_threads).packed(q, k, v, layout))
    torch.set_num_threads(before)
    torch.testing.assert_close(outputs[1], outputs[0], atol=0, rtol=0)
    torch.testing.assert_close(outputs[2], outputs[0], atol=0, rtol=0)


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("num_tokens", [1, 3, 300])
def test_layer_norm(name: str, dtype: torch.dtype, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((num_tokens, 24), (24,), (24,)))
    x[0] = 100
    exact = torch.nn.functional.layer_norm(x.double(), (24,), weight.double(), bias.double(), 1e-6)
    assert_close(load_backend(name).layer_norm(x, weight, bias, 1e-6), exact, ulps=2)


@pytest.mark.parametrize("dtype", BOTH)
def test_normalised_pixels_are_the_reference_processors(name: str, dtype: torch.dtype) -> None:
    """Bit for bit: (x - 255 mean) / (255 std) in float32, rounded once."""
    pixels = torch.arange(256, dtype=torch.uint8).repeat(4, 3)
    mean, std = (torch.tensor(values) * 255 for values in ([0.5, 0.48145466, 0.4], [0.5, 0.26862954, 0.3]))
    values = ((pixels.view(4, 3, 256).float() - mean.view(3, 1)) / std.view(3, 1)).flatten(1)
    normalised = load_backend(name).normalise(pixels, mean, std, dtype)
    torch.testing.assert_close(normalised, values.to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("num_tokens", [1, 3, 300])
def test_rms_norm(name: str, dtype: torch.dtype, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(num_tokens, 24, generator=generator).to(dtype),
        torch.rand(24, generator=generator).to(dtype),
    )
    x[0] = 0
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert_close(load_backend(name).rms_norm(x, weight, 1e-6), exact)


@pytest.mark.parametrize("dtype", BOTH)
def test_norm_rotate(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, HEADS + 2 * KV_HEADS, DIM, generator=generator).to(dtype)
    weight = torch.rand(HEADS + KV_HEADS, DIM, generator=generator).to(dtype)
    turn = rotation(torch.randn(5, DIM // 2, generator=generator), dtype)
    q, k = load_backend(name).norm_rotate(x, weight, 1e-6, turn, KV_HEADS)
    qk = x[:, : HEADS + KV_HEADS].double()
    normed = qk / (qk.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    cos, sin = (tensor.double() for tensor in turn)
    exact = normed * cos + torch.cat((normed[..., DIM // 2 :], normed[..., : DIM // 2]), -1) * sin
    # The plain twin rounds four times on the way.
    assert_close(q, exact[:, :HEADS], ulps=4)
    assert_close(k, exact[:, HEADS:], ulps=4)


@pytest.mark.parametrize("dtype", BOTH)
def test_gate(name: str, dtype: torch.dtype) -> None:
    x = 4 * torch.randn(7, 24, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, 0], x[0, 1], x[0, 2] = 0, 100, -100
    gate, up = x.double().chunk(2, -1)
    assert_close(load_backend(name).gate(x), gate / (1 + (-gate).exp()) * up, ulps=2)


@pytest.mark.parametrize("dtype", BOTH)
def test_rotate_pairs(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3 * HEADS, DIM, generator=generator).to(dtype)
    turn = pair_rotation(torch.randn(5, DIM // 2, generator=generator))
    q, k = load_backend(name).rotate_pairs(x, turn, HEADS)
    pairs = torch.view_as_complex(x[:, : 2 * HEADS].double().unflatten(-1, (-1, 2))) * turn
    exact = torch.view_as_real(pairs).flatten(-2)
    assert_close(q, exact[:, :HEADS])
    assert_close(k, exact[:, HEADS:])


@pytest.mark.parametrize("operation", ["rms_norm", "layer_norm", "normalise", "norm_rotate", "rotate_pairs", "gate"])
def test_rows_in_parts(monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    """What several threads share is what one computes."""
    x, weight, angles = torch.randn(5, 8, 8), torch.rand(6, 8), torch.randn(5, 4)
    arguments = {
        "rms_norm": (x.flatten(1), torch.rand(64), 1e-6),
        "layer_norm": (x.flatten(1), torch.rand(64), torch.rand(64), 1e-6),
        "normalise": (torch.arange(5 * 60, dtype=torch.uint8).view(5, 60), torch.rand(3), torch.rand(3), x.dtype),
        "norm_rotate": (x, weight, 1e-6, rotation(angles, x.dtype), 2),
        "rotate_pairs": (x, pair_rotation(angles), 3),
        "gate": (x.flatten(1),),
    }[operation]
    expected = getattr(load_backend(KERNELS), operation)(*arguments)
    monkeypatch.setattr("saccade.nn.backends.numba_cpu.PART_VALUES", 64)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    got = getattr(load_backend(KERNELS, 3), operation)(*arguments)
    torch.set_num_threads(before)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_unknown_backend_names_the_known() -> None:
    with pytest.raises(StartupError, match="torch_sdpa"):
        load_backend("nonesuch")


@pytest.mark.parametrize("available", [True, False])
def test_choice(monkeypatch: pytest.MonkeyPatch, available: bool) -> None:
    monkeypatch.setattr("saccade.nn.kernels.tiles.available", lambda: available)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert choose_backend(AUTO, cpu, torch.bfloat16, 64) == (TILES if available else KERNELS)
    assert choose_backend(AUTO, cpu, torch.float32, 64) == KERNELS
    assert choose_backend(AUTO, cpu, torch.float16, 64) == PLAIN
    assert choose_backend(AUTO, cpu, torch.float32, 6) == PLAIN
    assert choose_backend(AUTO, cuda, torch.bfloat16, 64) == PLAIN
    assert choose_backend(PLAIN, cpu, torch.bfloat16, 64) == PLAIN
    for name in (KERNELS, TILES):
        with pytest.raises(StartupError, match=f"{name} computes on a CPU"):
            choose_backend(name, cuda, torch.bfloat16, 64)
    with pytest.raises(StartupError, match="amx computes in bfloat16"):
        choose_backend(TILES, cpu, torch.float32, 64)
    if available:
        assert choose_backend(TILES, cpu, torch.bfloat16, 64) == TILES
    else:
        with pytest.raises(StartupError, match="a CPU with AMX"):
            choose_backend(TILES, cpu, torch.bfloat16, 64)

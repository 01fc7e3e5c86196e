"""Kernels for AMX against the same in float64, and where they may be used."""

import numpy as np
import pytest
import torch

from saccade.nn.activation import IDENTITY
from saccade.nn.backends.amx import TileProduct
from saccade.nn.kernels import tiles
from saccade.nn.kernels.compiled import compiled
from saccade.nn.kernels.tile_attention import attend
from saccade.nn.kernels.vector_math import exp2, exp2_coefficients, gelu, gelu_tanh, silu
from saccade.nn.kernels.vectors import load, store

pytestmark = pytest.mark.skipif(not tiles.available(), reason="this processor has no AMX")


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offset: int) -> torch.Tensor:
    """Attention in float64 of q [N, Q, D] over k, v [L, K, D]; query n sees the keys up to n + *offset*."""
    q, k, v = (tensor.double() for tensor in (q, k, v))
    k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], 1) for tensor in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q, k) * q.shape[2] ** -0.5
    hidden = torch.arange(k.shape[0]) > torch.arange(q.shape[0]).unsqueeze(1) + offset
    return torch.einsum("hnl,lhd->nhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offset: int, num_threads: int = 1) -> torch.Tensor:
    """The kernel's answer."""
    output = torch.full(q.shape, float("nan"), dtype=torch.bfloat16)
    attend(q, k, v, offset, output, num_threads)
    return output


@pytest.mark.parametrize("size", [1, 30])
@pytest.mark.parametrize("head_dim", [8, 32, 64, 72, 128])
@pytest.mark.parametrize(
    ("num_queries", "num_keys", "offset"),
    [
        (1, 1, 0),
        (1, 300, 299),
        (33, 33, 0),
        (70, 200, 130),
        (5, 128, 123),
        (129, 129, 129),
        (31, 257, 257),
        (64, 64, 0),
    ],
)
def test_attention(num_queries: int, num_keys: int, offset: int, head_dim: int, size: int) -> None:
    random = torch.Generator().manual_seed(head_dim)
    q, k, v = (
        torch.randn(rows, heads, head_dim, generator=random).bfloat16()
        for rows, heads in ((num_queries, 4), (num_keys, 2), (num_keys, 2))
    )
    exact = reference(size * q, k, v, offset)
    # Weights and the result are rounded to bfloat16.
    torch.testing.assert_close(attended(size * q, k, v, offset).double(), exact, rtol=2**-7, atol=2**-8)


def test_attention_is_as_exact_as_torchs() -> None:
    q, k, v = torch.randn(3, 400, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16().unbind(0)
    exact = reference(q, k, v, 400)
    heads = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v))
    theirs = torch.nn.functional.scaled_dot_product_attention(*heads)[0].transpose(0, 1)
    ours = attended(q, k, v, 400)
    assert (ours.double() - exact).abs().mean() < 1.05 * (theirs.double() - exact).abs().mean()


def test_keys_that_a_query_may_not_see_change_no_bit() -> None:
    q, k, v = torch.randn(3, 150, 2, 16, generator=torch.Generator().manual_seed(0)).bfloat16().unbind(0)
    before = attended(q, k, v, 0)
    k[100:], v[100:] = 1e6, -1e6
    torch.testing.assert_close(attended(q, k, v, 0)[:100], before[:100], rtol=0, atol=0)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_what_an_earlier_call_left_is_in_nobodys_answer(num_threads: int) -> None:
    """The room that a kernel works in is kept, and is wider than heads and keys of this size."""
    nothing = torch.full((160, 4, 64), float("nan")).bfloat16()
    attended(nothing, nothing, nothing, 160, num_threads)
    q, k, v = torch.randn(3, 35, 4, 24, generator=torch.Generator().manual_seed(0)).bfloat16().unbind(0)
    answer = attended(q, k, v, 0, num_threads).double()
    torch.testing.assert_close(answer, reference(q, k, v, 0), rtol=2**-7, atol=2**-8)


def test_a_token_is_attended_to_alike_in_every_chunk() -> None:
    """How a prompt is cut changes no bit of it."""
    q, k, v = torch.randn(3, 150, 2, 16, generator=torch.Generator().manual_seed(0)).bfloat16().unbind(0)
    whole = attended(q, k, v, 0)
    for cut in (1, 7, 64, 149):
        rest = attended(q[cut:], k, v, cut)
        torch.testing.assert_close(torch.cat((attended(q[:cut], k[:cut], v[:cut], 0), rest)), whole, rtol=0, atol=0)


@pytest.mark.parametrize("num_threads", [2, 3, 5])
@pytest.mark.parametrize(("num_queries", "num_keys", "offset"), [(1, 40, 39), (33, 33, 0), (200, 200, 200)])
def test_threads_change_no_bit(num_queries: int, num_keys: int, offset: int, num_threads: int) -> None:
    q, k, v = (torch.randn(count, 6, 32).bfloat16()[:, :4] for count in (num_queries, num_keys, num_keys))
    k, v = k[:, :2], v[:, :2]  # with gaps between tokens
    alone = attended(q, k, v, offset)
    torch.testing.assert_close(attended(q, k, v, offset, num_threads), alone, rtol=0, atol=0)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_numbers_too_small_for_a_kernel_are_numbers_behind_it(num_threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    q, k, v = torch.randn(3, 64, 2, 32).bfloat16().unbind(0)
    attended(q, k, v, 0, num_threads)
    TileProduct(torch.randn(64, 64).bfloat16(), None).apply(torch.randn(64, 64).bfloat16(), IDENTITY)
    # So many that every thread has some.
    assert (torch.full((1 << 20,), 1e-40) * 2 > 0).all()
    torch.set_num_threads(before)


@compiled
def of_every(number, x, out):  # type: ignore[no-untyped-def]
    """Function *number* of each value, sixteen at a time."""
    coefficients = exp2_coefficients()
    for offset in range(0, 4 * x.shape[0], 64):
        value = load(x.ctypes.data + offset)
        if number == 0:
            value = exp2(value, coefficients)
        elif number == 1:
            value = gelu_tanh(value, coefficients)
        elif number == 2:
            value = gelu(value, coefficients)
        else:
            value = silu(value, coefficients)
        store(out.ctypes.data + offset, value)


FUNCTIONS = {
    "exp2": torch.exp2,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    x = np.concatenate((np.linspace(-120, 0, 32_000), np.linspace(-8, 8, 32_000), np.linspace(0, 80, 1600)))
    x = x.astype(np.float32)
    if name == "exp2":
        x[:16] = -np.logspace(1, 38, 16)
    out = np.empty_like(x)
    of_every(list(FUNCTIONS).index(name), x, out)
    exact = FUNCTIONS[name](torch.from_numpy(x).double())
    # Far below the half of bfloat16's last place, 2e-3, that everything is rounded by afterwards.
    torch.testing.assert_close(torch.from_numpy(out).double(), exact, rtol=2e-5, atol=2e-6)


def test_not_available_without_the_instructions_or_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    found = dict(tiles.binding.get_host_cpu_features())
    try:
        for name in tiles.NEEDED:
            tiles.available.cache_clear()
            monkeypatch.setattr(tiles.binding, "get_host_cpu_features", lambda name=name: {**found, name: False})
            assert not tiles.available()
        monkeypatch.undo()
        tiles.available.cache_clear()
        monkeypatch.setattr(tiles, "REQUEST_PERMISSION", 0xFFFF)
        assert not tiles.available()
    finally:
        monkeypatch.undo()
        tiles.available.cache_clear()

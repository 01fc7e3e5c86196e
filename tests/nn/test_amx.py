"""Attention by AMX against the same in float64, on one thread and several."""

import ctypes
import os
from itertools import product

import pytest
import torch

from saccade.nn.backends import Workload
from saccade.nn.context import PackedLayout

backend = pytest.importorskip("saccade.nn.amx.backend")
pytestmark = pytest.mark.skipif(
    backend.VisionAttentionBackend.unavailable(Workload(dtype=torch.bfloat16)) is not None,
    reason="this processor has no AMX",
)


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention in float64 of q, k, v [N, Q, D]; returns [N, Q, D]."""
    q, k, v = (tensor.double() for tensor in (q, k, v))
    return torch.einsum("hnl,lhd->nhd", (torch.einsum("nhd,lhd->hnl", q, k) * q.shape[2] ** -0.5).softmax(-1), v)


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *lengths: int, num_threads: int = 1) -> torch.Tensor:
    """The backend's answer [N, Q, D] for sequences of *lengths*, by default one."""
    lengths = lengths or (len(q),)
    layout = PackedLayout(torch.tensor([0, *lengths]).cumsum(0).int(), max(lengths), lengths)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    answer: torch.Tensor = backend.VisionAttentionBackend().packed((q, k, v), layout)
    torch.set_num_threads(before)
    return answer.view(q.shape)


@pytest.fixture(autouse=True)
def worth_every_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small images are shared, too."""
    monkeypatch.setattr(backend, "PART_SCORES", 1)


@pytest.mark.parametrize("head_dim", [8, 32, 64, 72, 128])
def test_attention(head_dim: int) -> None:
    random = torch.Generator().manual_seed(head_dim)
    for length, size in product((1, 31, 33, 64, 70, 129, 257, 300), (1, 30)):
        q, k, v = torch.randn(3, length, 3, head_dim, generator=random).bfloat16().unbind(0)
        exact = reference(size * q, k, v)
        # Weights and the result are rounded to bfloat16.
        torch.testing.assert_close(
            attended(size * q, k, v).double(),
            exact,
            rtol=2**-7,
            atol=2**-8,
            msg=lambda message, row=(length, size): f"length and size {row}: {message}",
        )


def test_attention_is_as_exact_as_torchs() -> None:
    q, k, v = torch.randn(3, 400, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16().unbind(0)
    exact = reference(q, k, v)
    heads = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v))
    theirs = torch.nn.functional.scaled_dot_product_attention(*heads)[0].transpose(0, 1)
    ours = attended(q, k, v)
    assert (ours.double() - exact).abs().mean() < 1.05 * (theirs.double() - exact).abs().mean()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_no_answer_depends_on_an_earlier_one(num_threads: int) -> None:
    """Memory that an earlier call used comes back, and is wider than heads and keys of this size."""
    nothing = torch.full((160, 4, 64), float("nan")).bfloat16()
    assert attended(nothing, nothing, nothing, num_threads=num_threads).isnan().all()
    q, k, v = torch.randn(3, 35, 4, 24, generator=torch.Generator().manual_seed(0)).bfloat16().unbind(0)
    answer = attended(q, k, v, num_threads=num_threads).double()
    torch.testing.assert_close(answer, reference(q, k, v), rtol=2**-7, atol=2**-8)


def test_threads_and_gaps_change_no_bit() -> None:
    for lengths, num_heads in product(((1,), (33,), (200,), (30, 10, 90)), (1, 3)):
        qkv = torch.randn(sum(lengths), 3 * num_heads, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
        q, k, v = qkv.chunk(3, dim=1)
        alone = attended(*(tensor.contiguous() for tensor in (q, k, v)), *lengths)
        for num_threads in (2, 3, 7):
            ours = attended(q, k, v, *lengths, num_threads=num_threads)
            assert torch.equal(ours, alone), f"{lengths}, {num_heads} heads, {num_threads} threads"


def test_heads_of_an_odd_width_are_left_to_pytorch() -> None:
    q, k, v = torch.randn(3, 20, 2, 7, generator=torch.Generator().manual_seed(0)).bfloat16().unbind(0)
    torch.testing.assert_close(attended(q, k, v).double(), reference(q, k, v), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_subnormal_numbers_survive_a_call_of_the_kernel(num_threads: int) -> None:
    q, k, v = torch.randn(3, 64, 2, 32).bfloat16().unbind(0)
    attended(q, k, v, num_threads=num_threads)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    # So many that every thread has some.
    assert (torch.full((1 << 20,), 1e-40) * 2 > 0).all()
    torch.set_num_threads(before)


def test_without_openmp_one_thread_does_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.randn(3, 200, 3, 32).bfloat16().unbind(0)
    expected = attended(q, k, v, num_threads=3)
    monkeypatch.setattr(backend.ctypes, "CDLL", lambda _: object())
    assert torch.equal(attended(q, k, v, num_threads=3), expected)


def test_a_forked_process_computes_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP's threads stay behind in a fork, and a region that waits for them would never end."""
    counted: list[int] = []
    count = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(counted.append)
    address = ctypes.cast(count, ctypes.c_void_p).value
    openmp = backend.OpenMP()
    openmp.run(address, 1, 1)
    assert counted == [1]
    parent = os.getpid()
    monkeypatch.setattr(backend.os, "getpid", lambda: parent + 1)
    openmp.run(address, 2, 3)
    assert counted == [1, 2]

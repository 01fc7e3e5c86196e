"""The kernels against the same in float64, and the parts that a step's work is shared out in."""

import numpy as np
import pytest
import torch

from saccade.nn.backends.numba_cpu import PART_BYTES, split
from saccade.nn.kernels.compiled import compiled
from saccade.nn.kernels.exponential import exponential
from saccade.nn.kernels.words import WORDS, first, pack, second, words


@compiled
def exponentials(x, out):  # type: ignore[no-untyped-def]
    """out = e^x."""
    for i in range(x.shape[0]):
        out[i] = exponential(x[i])


@compiled
def apart(x, lower, upper):  # type: ignore[no-untyped-def]
    """Take words apart."""
    for i in range(x.shape[0]):
        lower[i], upper[i] = first(x[i]), second(x[i])


@compiled
def together(lower, upper, out):  # type: ignore[no-untyped-def]
    """Put words together."""
    for i in range(out.shape[0]):
        out[i] = pack(out[i], lower[i], upper[i])


def test_exponential() -> None:
    x = np.concatenate((np.linspace(-87, 0, 100_001), -np.logspace(-30, 1.9, 1000), [0.0])).astype(np.float32)
    out = np.empty_like(x)
    exponentials(x, out)
    assert np.abs(out / np.exp(x.astype(np.float64)) - 1).max() < 3e-7
    edges = np.array([0.0, -88.0, -1e30, -np.inf], np.float32)
    out = np.empty_like(edges)
    exponentials(edges, out)
    assert out[0] == 1
    assert (out[1:] < 2e-38).all()
    exponentials(np.full(1, np.nan, np.float32), out)
    assert np.isnan(out[0])


@pytest.mark.parametrize("dtype", WORDS)
def test_words(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (20_000,), generator=draw, dtype=torch.int64).to(torch.int32)
    edges = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3.4e38, -3.4e38, 1e-45])
    # 0x7fffffff and 0x7f800001 are NaN, and rounding their bits would make numbers of them.
    odd = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, 0x3F808000, 0x3F818000, 0x3F808001], dtype=torch.int32)
    values = torch.cat((bits, odd)).view(torch.float32)
    values = torch.cat((values, edges))
    lower, upper = values.numpy(), values.flip(0).numpy().copy()
    out = torch.empty(2 * len(values), dtype=dtype)
    together(lower, upper, words(out))
    expected = torch.stack((values, values.flip(0)), 1).flatten().to(dtype)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    back = np.empty_like(lower), np.empty_like(lower)
    apart(words(out), *back)
    np.testing.assert_array_equal(back[0], out[0::2].float().numpy())
    np.testing.assert_array_equal(back[1], out[1::2].float().numpy())


@pytest.mark.parametrize(
    ("lengths", "num_threads", "token_bytes", "expected"),
    [
        ([100] * 8, 1, PART_BYTES, [(8, 0, 4)]),
        ([100] * 8, 4, 1, [(8, 0, 4)]),  # too little work for two
        ([100] * 8, 2, PART_BYTES, [(4, 0, 4), (4, 0, 4)]),
        ([700, *[100] * 7], 2, PART_BYTES, [(1, 0, 4), (7, 0, 4)]),
        ([1300, *[100] * 7], 2, PART_BYTES, [(1, 0, 4), (7, 0, 4)]),
        ([2000], 2, PART_BYTES, [(1, 0, 1), (1, 1, 1), (1, 2, 1), (1, 3, 1)]),
        ([2000], 16, PART_BYTES, [(1, 0, 1), (1, 1, 1), (1, 2, 1), (1, 3, 1)]),
    ],
)
def test_split(lengths: list[int], num_threads: int, token_bytes: int, expected: list[tuple[int, int, int]]) -> None:
    parts = split(np.array(lengths), num_threads, 4, token_bytes)
    assert [(part.end - part.begin, part.head, part.num_heads) for part in parts] == expected
    covered = sorted(
        (row, part.head + head)
        for part in parts
        for row in range(part.begin, part.end)
        for head in range(part.num_heads)
    )
    assert covered == [(row, head) for row in range(len(lengths)) for head in range(4)]

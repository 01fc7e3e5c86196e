"""Triton's kernels in its interpreter at the shapes of real models: heads, groups, widths, unequal lengths."""

import pytest
import torch
from attention import attend, attend_packed
from tables import table

from saccade.nn import delta_rule, gpu, ops
from saccade.nn.backends import load_backend, load_vision_backend
from saccade.nn.context import KvCache
from saccade.nn.ops import GELU_TANH, SILU
from saccade.nn.rope import cos_sin

TRITON = "triton"
ROUNDING = 1e-6
"""||result - float64|| / ||float64|| of attention in float32: largest in these cases 2e-7 by Triton 3.8."""
OF_OPERATIONS = 2e-6
STEPS = {
    "unequal": ([1, 1, 1, 1], [1, 16, 17, 300]),
    "mixed": ([1, 1, 40, 9], [129, 5, 40, 70]),
}
"""Tokens of a step and of contexts: decodes, and decodes with a prompt and a chunk after a prefix."""


def off_by(output: torch.Tensor, expected: torch.Tensor) -> float:
    return float((output.double() - expected).norm() / expected.norm())


@table("name", STEPS)
@pytest.mark.parametrize(
    ("heads", "size"),
    [
        ((8, 1), 128),
        pytest.param((16, 2), 256, marks=pytest.mark.conformance),
        pytest.param((8, 2), 64, marks=pytest.mark.conformance),
        pytest.param((4, 4), 72, marks=pytest.mark.conformance),
    ],
)
def test_attention(heads: tuple[int, int], size: int, name: str) -> None:
    queries, contexts = STEPS[name]
    output, expected = attend(load_backend(TRITON), queries, contexts, torch.float32, size, dim=size, heads=heads)
    assert off_by(output, expected) <= ROUNDING


@pytest.mark.parametrize("size", [72, *(pytest.param(size, marks=pytest.mark.conformance) for size in (64, 128, 256))])
def test_attention_of_towers(size: int) -> None:
    output, expected = attend_packed(load_vision_backend(TRITON), (1, 65, 130), torch.float32, dim=size)
    assert off_by(output, expected) <= ROUNDING


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.conformance
@table(
    ("heads", "size", "num_pairs", "has_norm"),
    [((32, 8), 128, 64, True), ((28, 4), 128, 64, False), ((16, 2), 256, 32, True), ((32, 8), 64, 32, False)],
)
def test_heads(heads: tuple[int, int], size: int, num_pairs: int, has_norm: bool) -> None:
    (num_heads, num_kv_heads), slots = heads, torch.tensor([7, 2, 0])
    qkv = drawn(len(slots), num_heads + 2 * num_kv_heads, size)
    weight = drawn(num_heads + num_kv_heads, size) if has_norm else None
    rotation = cos_sin(drawn(len(slots), num_pairs) * 9, torch.float32)
    caches = [
        KvCache(*torch.zeros(2, 2, 4, num_kv_heads, size, dtype=dtype)) for dtype in (torch.float32, torch.float64)
    ]
    found = gpu.cached_heads(qkv, num_kv_heads, weight, 1e-6, rotation, caches[0], slots)
    assert found is not None
    cos, sin = (part.double() for part in rotation)
    weight = None if weight is None else weight.double()
    expected = ops.cached_heads(qkv.double(), num_kv_heads, weight, 1e-6, (cos, sin), caches[1], slots)
    pairs = [
        (found[0], expected[0]),
        *zip(found[1], expected[1], strict=True),
        *zip(*(c[:2] for c in caches), strict=True),
    ]
    assert max(off_by(one, other) for one, other in pairs) <= OF_OPERATIONS


@pytest.mark.conformance
@table("activation", [SILU, GELU_TANH])
def test_gated_activation(activation: ops.Activation) -> None:
    x = drawn(2, 2 * 12288)
    found = gpu.gated_activation(x, activation)
    assert found is not None
    gate, up = x.double().chunk(2, -1)
    assert off_by(found, activation(gate) * up) <= OF_OPERATIONS


@pytest.mark.conformance
@table("lengths", [(1, 1, 1), (1, 17, 40), (16, 2)])
def test_convolution(lengths: tuple[int, ...]) -> None:
    """The new states, too."""
    x, taps = drawn(sum(lengths), 8192), drawn(4, 8192)
    rows, states = torch.arange(len(lengths)).flip(0), drawn(len(lengths), 3, 8192)
    exact = states.double()
    found = gpu.causal_conv(x, taps, states, rows, lengths, SILU)
    assert found is not None
    expected = delta_rule.causal_conv(x.double(), taps.double(), exact, rows, lengths, SILU)
    assert max(off_by(found, expected), off_by(states, exact)) <= OF_OPERATIONS

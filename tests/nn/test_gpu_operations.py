"""Operations for GPUs in Triton's interpreter against the plain ones."""

import pytest
import torch
from tables import table

from saccade.nn import gpu, ops
from saccade.nn.context import KvCache
from saccade.nn.ops import GELU, GELU_TANH, SILU, resolve
from saccade.nn.rope import cos_sin

HALF = [torch.float16, torch.bfloat16]
HEADS, KV_HEADS, TOKENS, BLOCK = 4, 2, 2, 4
SLOTS = torch.tensor([9, 2])


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def cache(size: int, dtype: torch.dtype, seed: int = 7) -> KvCache:
    return KvCache(*(drawn(5, BLOCK, KV_HEADS, size, seed=seed + one).to(dtype) for one in range(2)))


@table("dtype", [*HALF, torch.float32])
@table(("norm", "part", "size"), [("own", 1, 16), ("none", 2, 24), ("float32", 1, 80)])
def test_cached_heads(norm: str, part: int, size: int, dtype: torch.dtype) -> None:
    """Also heads whose rear channels are not rotated, and a weight in float32."""
    rotation = cos_sin(drawn(TOKENS, size // 2 // part) * 9, dtype)
    weight = (
        None if norm == "none" else drawn(HEADS + KV_HEADS, size).abs().to(dtype if norm == "own" else torch.float32)
    )
    # Tokens with a gap between them, as a slice of a larger matrix has.
    qkv = drawn(TOKENS, (HEADS + 2 * KV_HEADS) * size + 8).to(dtype)[:, 8:].view(TOKENS, -1, size)
    fast, plain = cache(size, dtype), cache(size, dtype)
    found = gpu.cached_heads(qkv, KV_HEADS, weight, 1e-6, rotation, fast, SLOTS)
    assert found is not None
    in_double = KvCache(*(part.double() for part in plain[:2]))
    cos, sin = (part.double() for part in rotation)
    weight = None if weight is None else weight.double()
    expected = ops.cached_heads(qkv.double(), KV_HEADS, weight, 1e-6, (cos, sin), in_double, SLOTS)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7 if dtype == torch.bfloat16 else 2**-10
    for one, other in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)
    written = fast.keys.flatten(0, 1)[SLOTS], fast.values.flatten(0, 1)[SLOTS]
    assert all(torch.equal(one, other) for one, other in zip(written, found[1], strict=True))
    rest = torch.ones(5 * BLOCK, dtype=torch.bool).index_fill(0, SLOTS, False)
    for one, other in zip(fast[:2], plain[:2], strict=True):
        assert torch.equal(one.flatten(0, 1)[rest], other.flatten(0, 1)[rest])


def test_a_cache_in_another_format_is_written_by_the_plain_operation() -> None:
    qkv = drawn(TOKENS, HEADS + 2 * KV_HEADS, 16).half()
    own = cache(16, torch.float32)
    small = KvCache(*(part.to(torch.float8_e4m3fn) for part in own[:2]), 0.1, 0.2)
    rotation = cos_sin(drawn(TOKENS, 8), torch.float16)
    operations = resolve("cuda", torch.float16)
    found = operations.cached_heads(qkv, KV_HEADS, None, 0.0, rotation, small, SLOTS)
    expected = ops.cached_heads(qkv, KV_HEADS, None, 0.0, rotation, small, SLOTS)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1][1], expected[1][1])


@table("dtype", HALF)
@table("width", [3, 1500])
@pytest.mark.parametrize("activation", [SILU, GELU_TANH, GELU])
def test_gated_activation(activation: ops.Activation, width: int, dtype: torch.dtype) -> None:
    x = 4 * drawn(3, 2 * width).to(dtype)
    gate, up = x.double().chunk(2, -1)
    found = resolve("cuda", dtype).gated_activation(x, activation)
    tolerance = 2**-6 if dtype == torch.bfloat16 else 2**-9
    torch.testing.assert_close(found.double(), activation(gate) * up, rtol=tolerance, atol=1e-3)


@table("has_bias", [True, False])
def test_a_linear_layer_adds_to_the_residual(has_bias: bool) -> None:
    """It is overwritten."""
    x, residual, weight, bias = drawn(3, 8), drawn(3, 6), drawn(6, 8), drawn(6) if has_bias else None
    expected = ops.pack_linear(weight, bias).add_to(residual, x)
    before = residual.clone()
    assert torch.equal(ops.pack_linear(weight, bias).add_to(residual, x), expected)
    assert torch.equal(residual, before)
    weight, residual = weight.half(), residual.half()
    packed = resolve("cuda", torch.float16).pack_linear(weight, None if bias is None else bias.half())
    found = packed.add_to(residual, x.half())
    torch.testing.assert_close(found.float(), expected, rtol=0.01, atol=0.01)
    assert found.data_ptr() == residual.data_ptr()

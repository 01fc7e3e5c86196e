"""Operations for GPUs in Triton's interpreter against the plain ones."""

from typing import Any

import numpy as np
import pytest
import torch
from tables import table
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from saccade.nn import gpu, ops
from saccade.nn.context import KvCache
from saccade.nn.ops import GELU, GELU_TANH, SILU, resolve
from saccade.nn.rope import cos_sin, cos_sin_pairs

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
FORMATS = {"fp8e4nv": "float8_e4m3fn", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
NUMPY = {"float16": np.float16, "float32": np.float32}
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
    tolerance = TOLERANCES[dtype]
    for one, other in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)
    written = fast.keys.flatten(0, 1)[SLOTS], fast.values.flatten(0, 1)[SLOTS]
    assert all(torch.equal(one, other) for one, other in zip(written, found[1], strict=True))
    rest = torch.ones(5 * BLOCK, dtype=torch.bool).index_fill(0, SLOTS, False)
    for one, other in zip(fast[:2], plain[:2], strict=True):
        assert torch.equal(one.flatten(0, 1)[rest], other.flatten(0, 1)[rest])


class Converting(InterpreterBuilder):
    """Converts numbers as torch and GPUs do: Triton's interpreter cuts digits of bfloat16 off, or loses a carry."""

    def create_fp_to_fp(self, src: Any, dst_type: Any, _: Any = None) -> TensorHandle:
        given, wanted = (FORMATS[str(one)] for one in (src.dtype.scalar, dst_type.scalar))
        source, target = getattr(torch, given), getattr(torch, wanted)
        bits = torch.from_numpy(np.frombuffer(src.data.tobytes(), f"u{source.itemsize}").copy())
        found = bits.view(source).to(target).view(getattr(torch, f"uint{8 * target.itemsize}")).numpy()
        return TensorHandle(found.view(NUMPY.get(wanted, found.dtype)).reshape(src.data.shape), dst_type.scalar)

    def create_fp_trunc(self, src: Any, dst_type: Any) -> TensorHandle:
        return self.create_fp_to_fp(src, dst_type)

    create_fp_ext = create_fp_trunc


@table("dtype", HALF)
@table("has_norm", [True, False])
def test_a_cache_in_float8(has_norm: bool, dtype: torch.dtype) -> None:
    """It gets what the plain cache makes of the same heads, too large numbers and NaN among them."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("create_fp_to_fp", "create_fp_trunc", "create_fp_ext"):
            patch.setattr(InterpreterBuilder, name, getattr(Converting, name))
        check_float8(has_norm, dtype)


def check_float8(has_norm: bool, dtype: torch.dtype) -> None:
    qkv = 3 * drawn(TOKENS, HEADS + 2 * KV_HEADS, 24).to(dtype)
    qkv[1, -1, :3] = torch.tensor([float("inf"), -1000.0, float("nan")])
    weight = drawn(HEADS + KV_HEADS, 24).to(dtype) if has_norm else None
    rotation = cos_sin(drawn(TOKENS, 12), dtype)
    own = cache(24, torch.float32)
    small, plain = (KvCache(*(part.to(torch.float8_e4m3fn) for part in own[:2]), 0.1, 0.23) for _ in range(2))
    large = KvCache(*(part.to(dtype) for part in own[:2]))
    unrounded = gpu.cached_heads(qkv, KV_HEADS, weight, 1e-6, rotation, large, SLOTS)
    found = gpu.cached_heads(qkv, KV_HEADS, weight, 1e-6, rotation, small, SLOTS)
    assert found is not None
    assert unrounded is not None
    queries, (keys, values) = unrounded
    assert torch.equal(found[0], queries)
    for one, other in zip(found[1], plain.write(SLOTS, keys, values), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    for one, other in zip(small[:2], plain[:2], strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=0, equal_nan=True)


def test_heads_with_gaps_are_written_by_the_plain_operation() -> None:
    qkv = drawn(TOKENS, HEADS + 2 * KV_HEADS, 32).half()[..., ::2]
    fast, plain = cache(16, torch.float16), cache(16, torch.float16)
    rotation = cos_sin(drawn(TOKENS, 8), torch.float16)
    operations = resolve("cuda", torch.float16)
    found = operations.cached_heads(qkv, KV_HEADS, None, 0.0, rotation, fast, SLOTS)
    expected = ops.cached_heads(qkv, KV_HEADS, None, 0.0, rotation, plain, SLOTS)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(fast.keys, plain.keys)


def test_older_gpus_have_no_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (8, 6))
    qkv = drawn(TOKENS, HEADS + 2 * KV_HEADS, 16).half().as_subclass(OnGpu)
    small = KvCache(*(part.to(torch.float8_e4m3fn) for part in cache(16, torch.float32)[:2]))
    assert gpu.cached_heads(qkv, KV_HEADS, None, 0.0, cos_sin(drawn(TOKENS, 8), torch.float16), small, SLOTS) is None


@table("dtype", HALF)
@table(("heads", "size"), [(20, 72), (1, 8), (32, 128)])
def test_rotary_pairs(heads: int, size: int, dtype: torch.dtype) -> None:
    """Heads are a part of wider rows, as queries and keys next to values."""
    x = drawn(3, heads + 2, size).to(dtype)[:, 1:-1]
    rotation = cos_sin_pairs(drawn(3, size // 2) * 9)
    found = gpu.rotary_pairs(x, rotation)
    assert found is not None
    assert found.is_contiguous()
    torch.testing.assert_close(found, ops.rotary_pairs(x, rotation), rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    assert gpu.rotary_pairs(x.transpose(1, 2), rotation) is None


@table("dtype", HALF)
@table("shape", [(3, 40), (2, 4100), (2, 3, 16)])
def test_a_norm_with_a_weight_in_float32(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = 3 * drawn(*shape).to(dtype), drawn(shape[-1])
    found = gpu.rms_norm(x, weight, 1e-3)
    assert found is not None
    assert (found.dtype, found.shape) == (dtype, shape)
    expected = ops.rms_norm(x.double(), weight.double(), 1e-3)
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    torch.testing.assert_close(found, ops.rms_norm(x, weight, 1e-3), rtol=TOLERANCES[dtype], atol=0)


def test_other_norms_are_torch_s() -> None:
    x = drawn(3, 40).half()
    assert gpu.rms_norm(x, drawn(40).half(), 1e-3) is None
    assert gpu.rms_norm(x[:, ::2], drawn(20), 1e-3) is None


@table("dtype", HALF)
@table(("heads", "size"), [(4, 128), (3, 24)])
@table("has_float_heads", [False, True])
def test_gated_norm(has_float_heads: bool, heads: int, size: int, dtype: torch.dtype) -> None:
    """Heads come from the delta rule, in its dtype; the gates may be a part of wider rows."""
    x, gate = drawn(3, heads, size).to(dtype), 4 * drawn(3, heads * size + 8).to(dtype)[:, 8:]
    weight = drawn(size)
    found = gpu.gated_norm(x.float() if has_float_heads else x, gate, weight, 1e-3)
    assert found is not None
    assert found.dtype == dtype
    tolerance = TOLERANCES[dtype]
    expected = ops.rms_norm(x.double(), weight.double(), 1e-3).flatten(1) * SILU(gate.double())
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found, ops.gated_norm(x, gate, weight, 1e-3), rtol=tolerance, atol=2**-10)
    assert gpu.gated_norm(x.transpose(0, 1), gate, weight, 1e-3) is None


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

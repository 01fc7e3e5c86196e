"""Operations in plain PyTorch and faster ones against the same in float64, and how they are chosen."""

import dataclasses

import pytest
import torch
from tables import table
from torch import nn

from saccade.nn import ops
from saccade.nn.layers import Linear, use_operations
from saccade.nn.ops import ACTIVATIONS, PLAIN, SILU, Activation, Operations, PlainLinear, resolve
from saccade.nn.rope import cos_sin, cos_sin_pairs

HEADS, DIM = 6, 8
BOTH = [torch.float32, torch.bfloat16]
CHOSEN = [(PLAIN, dtype) for dtype in BOTH] + [(resolve("cpu", dtype), dtype) for dtype in BOTH]
with_every_dtype = pytest.mark.parametrize(
    ("operations", "dtype"), CHOSEN, ids=["plain-float32", "plain-bfloat16", "cpu-float32", "cpu-bfloat16"]
)


def assert_close(output: torch.Tensor, exact: torch.Tensor, ulps: float = 1) -> None:
    """*exact* was computed in float64; values are of about 1."""
    tolerance = 1e-5 if output.dtype == torch.float32 else 2**-8 * ulps
    torch.testing.assert_close(output.double(), exact, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", BOTH)
def test_normalised_pixels_are_the_reference_processors(dtype: torch.dtype) -> None:
    """Bit for bit: (x - 255 mean) / (255 std) in float32, rounded once."""
    pixels = torch.arange(256, dtype=torch.uint8).repeat(4, 3)
    mean, std = (torch.tensor(values) * 255 for values in ([0.5, 0.48145466, 0.4], [0.5, 0.26862954, 0.3]))
    values = ((pixels.view(4, 3, 256).float() - mean.view(3, 1)) / std.view(3, 1)).flatten(1)
    normalised = ops.normalise_pixels(pixels, mean, std, dtype)
    torch.testing.assert_close(normalised, values.to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", BOTH)
@table("num_tokens", [1, 3, 300])
def test_rms_norm(dtype: torch.dtype, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(num_tokens, 24, generator=generator).to(dtype),
        torch.rand(24, generator=generator).to(dtype),
    )
    x[0] = 0
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert_close(ops.rms_norm(x, weight, 1e-6), exact)


@pytest.mark.parametrize("dtype", BOTH)
def test_rotary(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, HEADS + 2, DIM, generator=generator).to(dtype)[:, :HEADS]
    cos, sin = rotation = cos_sin(torch.randn(5, DIM // 2, generator=generator), dtype)
    halves = torch.cat((x[..., DIM // 2 :], x[..., : DIM // 2]), -1)
    exact = x.double() * cos.double() + halves.double() * sin.double()
    assert_close(ops.rotary(x, rotation), exact, ulps=2)


@pytest.mark.parametrize("dtype", BOTH)
def test_norm_rotary(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, HEADS + 2, DIM, generator=generator).to(dtype)[:, :HEADS]
    weight = torch.rand(HEADS, DIM, generator=generator).to(dtype)
    rotation = cos_sin(torch.randn(5, DIM // 2, generator=generator), dtype)
    normed = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    cos, sin = (tensor.double() for tensor in rotation)
    exact = normed * cos + torch.cat((normed[..., DIM // 2 :], normed[..., : DIM // 2]), -1) * sin
    # The plain function rounds four times on the way.
    assert_close(ops.norm_rotary(x, weight, 1e-6, rotation), exact, ulps=4)


@with_every_dtype
@table("activation", sorted(ACTIVATIONS))
def test_gated_activation(operations: Operations, dtype: torch.dtype, activation: str) -> None:
    x = 4 * torch.randn(7, 24, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, 0], x[0, 1], x[0, 2] = 0, 100, -100
    gate, up = x.double().chunk(2, -1)
    function = ACTIVATIONS[activation]
    assert_close(operations.gated_activation(x, function), function(gate) * up, ulps=4)


@with_every_dtype
@table("num_tokens", [1, 5, 128, 129, 300])
def test_rotary_pairs(operations: Operations, dtype: torch.dtype, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, 12, DIM, generator=generator).to(dtype)[:, :8]
    rotation = cos_sin_pairs(torch.randn(num_tokens, DIM // 2, generator=generator))
    exact = torch.view_as_real(torch.view_as_complex(x.double().unflatten(-1, (-1, 2))) * rotation).flatten(-2)
    output = operations.rotary_pairs(x, rotation)
    assert_close(output, exact)
    assert torch.equal(output, PLAIN.rotary_pairs(x, rotation))


def test_rotary_rotates_pairs() -> None:
    angles = torch.tensor([[0.3, 1.2]])
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    # The weight undoes the norm.
    weight = x[0].square().mean(-1, keepdim=True).sqrt().expand(1, 4)
    rotated = ops.norm_rotary(x, weight, 0.0, cos_sin(angles, torch.float32))[0, 0]
    complex_x = torch.complex(x[0, 0, :2], x[0, 0, 2:]) * torch.polar(torch.ones(2), angles[0])
    torch.testing.assert_close(rotated, torch.cat((complex_x.real, complex_x.imag)))


def made(in_features: int, partitions: int | tuple[int, ...], dtype: torch.dtype, bias: bool = True) -> Linear:
    """A layer with weights; results are about as large as inputs."""
    random = torch.Generator().manual_seed(1)
    linear = Linear(in_features, partitions, bias)
    for parameter in linear.parameters():
        parameter.data = (torch.randn(parameter.shape, generator=random) * in_features**-0.5).to(dtype)
    return linear


def packs(operations: Operations) -> bool:
    """Whether *operations* pack weights: on a processor without instructions for bfloat16 none do."""
    return not isinstance(operations.pack_linear(torch.ones(2, 2, dtype=torch.bfloat16), None), PlainLinear)


@with_every_dtype
@table("bias", [True, False])
@table("num_rows", [1, 8, 300])
def test_packing_changes_no_bit(operations: Operations, num_rows: int, bias: bool, dtype: torch.dtype) -> None:
    linear = made(96, (64, 160), dtype, bias)
    x = torch.randn(num_rows, 96, generator=torch.Generator().manual_seed(num_rows)).to(dtype)
    with torch.inference_mode():
        plain = linear(x)
        use_operations(linear, operations)
        assert torch.equal(linear(x), plain)
    is_plain = isinstance(linear.packed, PlainLinear)
    assert (linear.weight.numel() > 0) == is_plain == (not packs(operations))


@table("num_rows", [1, 16, 17, 40, 64])
@with_every_dtype
@table("activation", ["none", *sorted(ACTIVATIONS)])
def test_activations_and_residuals_are_those_of_float32(
    operations: Operations, activation: str, dtype: torch.dtype, num_rows: int
) -> None:
    random = torch.Generator().manual_seed(2)
    linear = made(96, 160, dtype)
    x, residual = (4 * torch.randn(num_rows, size, generator=random).to(dtype) for size in (96, 160))
    product = nn.functional.linear(x.float(), linear.weight.float(), linear.bias.float())
    use_operations(linear, operations)
    # The plain sum is rounded twice, the first time where it is as large as 8.
    bound = 2**-7 if packs(operations) else 2**-5
    tolerance = {} if dtype == torch.float32 else {"rtol": bound, "atol": bound}
    function = ACTIVATIONS.get(activation)
    with torch.inference_mode():
        activated, added = linear(x, function), linear.add_to(residual, x)
    torch.testing.assert_close(activated.float(), function(product) if function else product, **tolerance)
    torch.testing.assert_close(added.float(), residual.float() + product, **tolerance)


def test_only_bfloat16_has_faster_operations() -> None:
    """Kernels for quantised weights, on a CPU, take float32 as well."""
    assert dataclasses.replace(resolve("cpu", torch.float32), kernels={}) == resolve("cuda", torch.float32) == PLAIN
    on_gpu = resolve("cuda", torch.bfloat16)
    names = {
        field.name for field in dataclasses.fields(PLAIN) if getattr(on_gpu, field.name) != getattr(PLAIN, field.name)
    }
    products = {"experts", "pack_linear", "kernels"}
    launches = {
        "cached_heads",
        "causal_conv",
        "gated_activation",
        "rms_norm",
        "gated_norm",
        "rotary_pairs",
        "softmax_top_k",
    }
    assert names == products | launches
    assert resolve("cpu", torch.bfloat16).gated_activation is ops.gated_activation
    assert resolve("cpu", torch.bfloat16).pack_linear is not ops.pack_linear


def test_onednn_declines_where_the_processor_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: False)
    packed = resolve("cpu", torch.bfloat16).pack_linear(torch.ones(2, 2, dtype=torch.bfloat16), None)
    assert isinstance(packed, PlainLinear)


def gated_activation(x: torch.Tensor, activation: Activation) -> torch.Tensor | None:
    """An implementation that declines all shapes but [1, 4]."""
    return torch.full((1, 2), 7.0) if x.shape == (1, 4) else None


def test_an_implementation_may_decline_by_shape() -> None:
    chosen = resolve("cpu", torch.float32, {("gated_activation", "cpu", torch.float32): __name__})
    assert chosen.gated_activation(torch.zeros(1, 4), SILU).tolist() == [[7, 7]]
    assert chosen.gated_activation(torch.zeros(2, 4), SILU).tolist() == [[0, 0], [0, 0]]
    assert chosen.rotary_pairs is ops.rotary_pairs

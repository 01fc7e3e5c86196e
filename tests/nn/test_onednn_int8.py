"""Products of int8 weights and activations on a CPU: exact sums, the same in every batch, and what is declined."""

from functools import partial

import pytest
import torch
from products import INPUTS, WIDTHS, drawn, joined
from tables import table
from torch.nn import functional
from weights import FORMATS, held

from saccade.nn import ops
from saccade.nn.formats.int8 import Int8, rounded_rows
from saccade.nn.formats.onednn_int8 import Int8Product, gelu_tanh, rounded_tokens, saturates
from saccade.nn.formats.onednn_packing import packed_weight
from saccade.nn.formats.quantised import QuantisedLinear, QuantisedWeight, Region
from saccade.nn.layers import Linear, use_operations
from saccade.nn.ops import resolve

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = 0.02
"""Of the largest result: activations are rounded to eight bits."""


def layer_of(name: str, dtype: torch.dtype) -> Linear:
    layer = Linear(INPUTS, WIDTHS).to(dtype)
    layer.bias.data = drawn(sum(WIDTHS), seed=5).to(dtype)
    layer.hold("weight", joined(name))
    return layer


def whole_numbers(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Numbers from -127 to 127, each row with a 127: rounding then changes nothing."""
    numbers = torch.randint(-127, 128, (rows, columns), generator=torch.Generator().manual_seed(seed)).float()
    numbers[:, 0] = 127
    return numbers


@table("num_tokens", [0, 1, 2, 7, 130])
@table("columns", [48, 2048, 6144])
def test_sums_are_those_of_whole_numbers(columns: int, num_tokens: int) -> None:
    """Weights and activations of 127 everywhere as well, whose pairs exceed 16 bits on processors without VNNI."""
    weight, x = whole_numbers(40, columns, 0), whole_numbers(num_tokens, columns, 1)
    weight[:2], weight[2:4, 1:], x[:1] = 127, -127, 127
    layer = Linear.of(weight)
    layer.hold("weight", (rounded_rows(weight),))
    assert use_operations(layer, resolve("cpu", torch.float32)) == []
    exact = x.long() @ weight.long().t()
    found = layer(x)
    small = exact.abs() < 1 << 24
    assert torch.equal(found[small].long(), exact[small])
    assert ((found.double() - exact).abs() <= exact.abs() * torch.finfo(torch.float32).eps).all()


@table("shape", [(128, 192), (6144, 2048), (100, 72), (64, 48)])
def test_later_weights_of_a_shape_are_packed_like_the_first(shape: tuple[int, int]) -> None:
    """To the bit, for a token with a zero point as well, which needs the sums of the weights."""
    x = torch.randint(0, 256, (3, shape[1]), generator=torch.Generator().manual_seed(3)).to(torch.uint8)
    kept = []
    for seed in range(3):
        values = whole_numbers(*shape, seed).to(torch.int8)
        kept.append(packed_weight(values))
        exact = (x.int() - 128) @ values.int().t()
        ones, zeros = torch.ones(shape[0]), torch.zeros(shape[0], dtype=torch.int32)
        found = torch.ops.onednn.qlinear_pointwise(
            x, 1.0, 128, kept[-1], ones, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        assert saturates() or torch.equal(found.int(), exact)


@table("num_tokens", [1, 7, 300])
@table("dtype", DTYPES)
def test_products(dtype: torch.dtype, num_tokens: int) -> None:
    layer, twin = layer_of("w8a8", dtype), layer_of("w8a8", dtype)
    assert use_operations(layer, resolve("cpu", dtype)) == []
    assert isinstance(layer.packed, Int8Product)
    x, residual = drawn(num_tokens, INPUTS).to(dtype), drawn(num_tokens, sum(WIDTHS), seed=1).to(dtype)
    for found, expected in (
        (layer(x), twin(x)),
        (layer(x, ops.GELU_TANH), twin(x, ops.GELU_TANH)),
        (layer.add_to(residual, x), twin.add_to(residual, x)),
    ):
        assert found.dtype == dtype
        assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()


@table("num_tokens", [3, 300])
@table("dtype", DTYPES)
def test_an_activation_may_have_fewer_outputs(dtype: torch.dtype, num_tokens: int) -> None:
    """It gets float32, whatever the dtype of the network, so that gates are rounded once."""
    layer, twin = layer_of("w8a8", dtype), layer_of("w8a8", torch.float32)
    twin.bias.data = layer.bias.data.float()
    for one in (layer, twin):
        use_operations(one, resolve("cpu", one.weight.dtype))
    x = drawn(num_tokens, INPUTS).to(dtype)
    gate = partial(ops.gated_activation, activation=ops.SILU)
    found = layer(x, gate)
    assert found.shape == (num_tokens, sum(WIDTHS) // 2)
    assert torch.equal(found, gate(twin(x.float())).to(dtype))


def test_gelu_by_sigmoid_is_gelu_by_tanh() -> None:
    x = torch.linspace(-30, 30, 20001)
    expected = functional.gelu(x.double(), approximate="tanh")
    assert ((gelu_tanh(x) - expected).abs() <= 1e-6 * expected.abs() + 1e-8).all()
    assert torch.equal(gelu_tanh(torch.tensor([0.0, float("inf")])), torch.tensor([0.0, float("inf")]))
    assert gelu_tanh(torch.tensor([float("nan")])).isnan().all()


@table("dtype", DTYPES)
def test_a_token_has_the_same_result_in_every_batch(dtype: torch.dtype) -> None:
    layer = layer_of("w8a8", dtype)
    use_operations(layer, resolve("cpu", dtype))
    x = drawn(150, INPUTS).to(dtype) * torch.logspace(-3, 3, 150).unsqueeze(1).to(dtype)
    together = layer(x)
    for some in (x[:1], x[3:8], x[100:]):
        first = int((x == some[0]).all(1).nonzero()[0])
        assert torch.equal(layer(some), together[first : first + len(some)])


@pytest.mark.parametrize("by_halves", [False, True])
def test_both_ways_agree(by_halves: bool) -> None:
    """Weights of six bits saturate nowhere."""
    weight = (drawn(32, INPUTS) * 16).round().clamp(-63, 63).to(torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(weight, None)
    scales, zeros = torch.full((32,), 0.25), torch.zeros(32, dtype=torch.int32)
    x = whole_numbers(5, INPUTS, 3)
    found = Int8Product(packed, scales, zeros, None, by_halves).apply(x, None)
    assert torch.equal(found, (x @ weight.float().t()) * 0.25)


def test_activations_are_rounded_to_the_nearest() -> None:
    x = torch.tensor([[127.0, -127.0, 0.6, -0.6, 0.4, -0.4, 0.0]])
    codes, scales = rounded_tokens(x)
    assert (codes.tolist(), scales.tolist()) == ([[255, 1, 129, 127, 128, 128, 128]], [[1.0]])


def test_a_token_of_zeros_has_the_bias() -> None:
    layer = layer_of("w8a8", torch.float32)
    use_operations(layer, resolve("cpu", torch.float32))
    assert torch.equal(layer(torch.zeros(2, INPUTS)), layer.bias.expand(2, -1))


@table("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(value: float) -> None:
    layer = layer_of("w8a8", torch.float32)
    use_operations(layer, resolve("cpu", torch.float32))
    x = drawn(3, INPUTS)
    x[1, 5] = value
    found = layer(x)
    assert not found[1].isfinite().any()
    assert found[[0, 2]].isfinite().all()


def test_too_many_columns_stay_dequantised() -> None:
    fields = {"weight": torch.zeros(1, 70000, dtype=torch.int8), "weight_scale": torch.ones(1, 1)}
    layer = Linear(70000, 1, bias=False)
    layer.hold("weight", (held("w8a8", fields, Region(0, 1, 0, 70000)),))
    assert use_operations(layer, resolve("cpu", torch.float32)) == [
        "sums of more than 65793 columns may exceed 32 bits"
    ]
    assert isinstance(layer.packed, QuantisedLinear)


def test_one_scale_for_the_whole_weight() -> None:
    weight = QuantisedWeight(
        Int8(None),
        {"weight": whole_numbers(8, 16, 0).to(torch.int8), "weight_scale": torch.tensor([0.5])},
        Region(0, 8, 0, 16),
    )
    layer = Linear(16, 8, bias=False)
    layer.hold("weight", (weight,))
    use_operations(layer, resolve("cpu", torch.float32))
    x = whole_numbers(2, 16, 1)
    assert torch.equal(layer(x), functional.linear(x, weight.dequantised(torch.float32)))


@pytest.mark.parametrize(
    "name", [name for name in FORMATS if FORMATS[name].kind in ("int8", "w8a16", "fp8_rows", "int4")]
)
def test_reordered_rows_take_their_scales_along(name: str) -> None:
    layer = Linear(INPUTS, WIDTHS)
    layer.bias.data = drawn(sum(WIDTHS), seed=5)
    layer.hold("weight", joined(name))
    order = torch.randperm(sum(WIDTHS), generator=torch.Generator().manual_seed(0))
    weight, bias = layer.dequantised()[order], layer.bias[order]
    layer.reorder_rows(order)
    assert torch.equal(layer.dequantised(), weight)
    assert torch.equal(layer.bias, bias)
    assert isinstance(layer.packed, QuantisedLinear) == (name in ("w8a8", "int8 rows", "fp8 rows", "int4"))

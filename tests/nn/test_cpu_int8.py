"""Products with int8 weights alone on a CPU: near the dequantised weights, the same in every batch, what is declined."""

import pytest
import torch
from products import INPUTS, WIDTHS, drawn, joined
from references.formats import REFERENCES
from tables import table
from torch.nn import functional
from weights import held

from saccade.nn import ops
from saccade.nn.formats import cpu_int8
from saccade.nn.formats.cpu_int8 import CpuInt8
from saccade.nn.formats.packed_ints import gptq
from saccade.nn.formats.quantised import QuantisedLinear, QuantisedWeight, Region
from saccade.nn.layers import Linear, use_operations
from saccade.nn.ops import resolve

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.01}
"""Of the largest result. Rounding activations to eight bits would change 1 % of it, in float32 too."""


def layer_of(parts: tuple[QuantisedWeight, ...], dtype: torch.dtype) -> Linear:
    layer = Linear(INPUTS, tuple(part.region.num_rows for part in parts)).to(dtype)
    layer.bias.data = drawn(sum(layer.partitions), seed=5).to(dtype)
    layer.hold("weight", parts)
    return layer


def gptq_of_rows(zero: int) -> QuantisedWeight:
    """GPTQ in eight bits with one group, whose zero points are *zero*."""
    form = gptq(8, INPUTS, zeros_offset=0)
    stored = REFERENCES["gptq int8"].write(drawn(16, INPUTS))
    word = sum(zero << shift for shift in (0, 8, 16, 24))
    zeros = torch.tensor(word - (1 << 32), dtype=torch.int64).to(torch.int32).expand(4, 1).contiguous()
    fields = {"qweight": stored["qweight"].t().contiguous(), "scales": torch.full((16, 1), 0.01), "qzeros": zeros}
    return QuantisedWeight(form, fields, Region(0, 16, 0, INPUTS))


@table("num_tokens", [0, 1, 7, 300])
@pytest.mark.parametrize("dtype", TOLERANCES)
@table("parts", [joined("int8 rows"), (gptq_of_rows(128),)])
def test_products_are_those_of_dequantised_weights(
    parts: tuple[QuantisedWeight, ...], dtype: torch.dtype, num_tokens: int
) -> None:
    """Also of more tokens than the crossing."""
    layer, twin = layer_of(parts, dtype), layer_of(parts, dtype)
    assert use_operations(layer, resolve("cpu", dtype)) == []
    assert isinstance(layer.packed, CpuInt8)
    num_outputs = sum(layer.partitions)
    x, residual = drawn(num_tokens, INPUTS).to(dtype), drawn(num_tokens, num_outputs, seed=1).to(dtype)
    for found, expected in (
        (layer(x), twin(x)),
        (layer(x, ops.GELU_TANH), twin(x, ops.GELU_TANH)),
        (layer.add_to(residual, x), twin.add_to(residual, x)),
    ):
        assert (found.dtype, found.shape) == (dtype, (num_tokens, num_outputs))
        assert ((found - expected).abs() <= TOLERANCES[dtype] * expected.abs().amax()).all() if num_tokens else True


def test_both_sides_of_the_crossing_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = layer_of(joined("int8 rows"), torch.float32), drawn(3, INPUTS)
    use_operations(layer, resolve("cpu", torch.float32))
    by_kernel = layer(x)
    monkeypatch.setattr(cpu_int8, "CROSSING", 1)
    monkeypatch.setattr(cpu_int8, "OUTPUTS_AT_ONCE", 100)
    torch.testing.assert_close(layer(x), by_kernel, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_token_has_the_same_result_in_every_small_batch(dtype: torch.dtype) -> None:
    layer = layer_of(joined("int8 rows"), dtype)
    use_operations(layer, resolve("cpu", dtype))
    x = drawn(cpu_int8.CROSSING - 1, INPUTS).to(dtype)
    together = layer(x)
    for first, last in ((0, 1), (3, 8), (5, len(x))):
        assert torch.equal(layer(x[first:last]), together[first:last])


def test_memory_of_a_packed_layer() -> None:
    layer = layer_of(joined("int8 rows"), torch.bfloat16)
    use_operations(layer, resolve("cpu", torch.bfloat16))
    packed = layer.packed
    assert isinstance(packed, CpuInt8)
    assert packed.values_OI.nbytes + packed.scales_O.nbytes == (INPUTS + 4) * sum(WIDTHS)


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (held("gptq int8", REFERENCES["gptq int8"].write(drawn(16, 64)), Region(0, 16, 0, 64)), "in groups of 32"),
        (gptq_of_rows(129), "with zero points"),
    ],
)
def test_what_no_kernel_takes_stays_dequantised(part: QuantisedWeight, reason: str) -> None:
    layer = Linear(part.region.num_columns, part.region.num_rows, bias=False)
    layer.hold("weight", (part,))
    x = drawn(2, part.region.num_columns)
    (found,) = use_operations(layer, resolve("cpu", torch.float32))
    assert reason in found
    assert isinstance(layer.packed, QuantisedLinear)
    assert torch.equal(layer(x), functional.linear(x, part.dequantised(torch.float32)))

"""Products with INT4 weights on a CPU: by PyTorch's kernel, by unpacking, and what is declined."""

import dataclasses

import pytest
import torch
from products import INPUTS, WIDTHS, drawn, joined
from references.formats import REFERENCES
from tables import table
from torch.nn import functional
from weights import FORMATS, held

from saccade.nn import ops
from saccade.nn.formats import cpu_int4
from saccade.nn.formats.cpu_int4 import CpuInt4, known_memory
from saccade.nn.formats.packed_ints import compressed
from saccade.nn.formats.quantised import WHOLE_ROW, QuantisedLinear, QuantisedWeight, Region
from saccade.nn.layers import Linear, use_operations
from saccade.nn.ops import resolve

NAMES = [name for name, form in FORMATS.items() if form.kind == "int4"]
F32, BF16 = torch.float32, torch.bfloat16
DTYPES = [F32, BF16]
TOLERANCE = 0.012
"""Of the largest result: activations, scales and zeros are rounded to bfloat16."""


def packed_linear(parts: tuple[QuantisedWeight, ...], dtype: torch.dtype = torch.float32) -> Linear:
    region = parts[0].region
    layer = Linear(region.num_columns, tuple(part.region.num_rows for part in parts), bias=False).to(dtype)
    layer.hold("weight", parts)
    assert use_operations(layer, resolve("cpu", dtype)) == []
    assert isinstance(layer.packed, CpuInt4)
    return layer


def packed_in_blocks(name: str, rows: int) -> CpuInt4:
    """The joined layer, read in blocks of *rows* outputs."""
    layer = packed_linear(joined(name)).packed
    assert isinstance(layer, CpuInt4)
    return dataclasses.replace(layer, block_rows=rows)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    assert ((found - expected).abs() <= TOLERANCE * expected.abs().max()).all()


@table("num_tokens", [0, 1, 7, 300])
@table("dtype", DTYPES)
@table("name", NAMES)
def test_products(name: str, dtype: torch.dtype, num_tokens: int) -> None:
    """Also of more tokens than the crossing."""
    layer, twin = (Linear(INPUTS, WIDTHS).to(dtype) for _ in range(2))
    for one in (layer, twin):
        one.bias.data = drawn(sum(WIDTHS), seed=5).to(dtype)
        one.hold("weight", joined(name))
    assert use_operations(layer, resolve("cpu", dtype)) == []
    x, residual = drawn(num_tokens, INPUTS).to(dtype), drawn(num_tokens, sum(WIDTHS), seed=1).to(dtype)
    found, expected = layer(x, ops.SILU), twin(x, ops.SILU)
    assert found.shape == expected.shape
    if num_tokens:
        assert_near(found, expected)
        assert_near(layer.add_to(residual, x), twin.add_to(residual, x))


@table("name", NAMES)
def test_both_sides_of_the_crossing_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = packed_linear(joined(name)), drawn(3, INPUTS)
    by_kernel = layer(x)
    monkeypatch.setattr(cpu_int4, "crossing", lambda _: 1)
    monkeypatch.setattr(cpu_int4, "UNPACKED_AT_ONCE", 128 * INPUTS)
    by_unpacking = layer(x)
    assert not torch.equal(by_kernel, by_unpacking)
    assert_near(by_kernel, by_unpacking)


@table("dtype", DTYPES)
@table("rows", [32, 64])
@table("name", NAMES)
def test_unpacked_values_are_those_of_codes_and_rounded_scales(name: str, rows: int, dtype: torch.dtype) -> None:
    """To the bit, in the layout of AVX2 as well as in that of AVX512."""
    layer = packed_in_blocks(name, rows)
    pairs = layer.scales_and_zeros_GP2.to(dtype)
    for some in (slice(0, 192), slice(64, 128), slice(128, 512)):
        found = layer.unpacked(some, dtype)
        for row in range(some.start, some.stop, 17):
            block, place = divmod(row, rows)
            of_row = layer.packed.view(-1, INPUTS, rows // 2)[block, :, place % (rows // 2)]
            codes = (of_row >> (4 * (place // (rows // 2)))) & 15
            scales, zeros = pairs[:, row].repeat_interleave(layer.group_size, 0).unbind(1)
            assert torch.equal(found[row - some.start], (codes.to(torch.int8) - 8) * scales + zeros)


@table("dtype", DTYPES)
@table("rows", [32, 64])
@table("name", NAMES)
def test_weights_in_onednns_layout_are_the_unpacked_ones(name: str, rows: int, dtype: torch.dtype) -> None:
    """To the bit, also if a block of that layout has several blocks of four bits."""
    layer = packed_in_blocks(name, rows)
    memory = known_memory(128, INPUTS, dtype, rows)
    if memory is None:
        pytest.skip(f"oneDNN has no known layout of {dtype} here")
    memory = memory.copy()
    for some in (slice(0, 128), slice(64, 192)):
        layer.write(some, dtype, memory.words_BWR)
        assert torch.equal(memory.rows(torch.arange(128)), layer.unpacked(some, dtype))


@table("dtype", DTYPES)
def test_many_tokens_have_the_product_of_the_unpacked_weight(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit in bfloat16, and in parts of which the last begins earlier."""
    monkeypatch.setattr(cpu_int4, "UNPACKED_AT_ONCE", 128 * INPUTS)
    layer, x = packed_linear(joined("int4"), dtype), drawn(300, INPUTS).to(dtype)
    assert isinstance(layer.packed, CpuInt4)
    weight = layer.packed.unpacked(slice(0, len(layer.packed.packed)), dtype)[: sum(WIDTHS)]
    found, expected = layer(x), functional.linear(x, weight)
    monkeypatch.setattr(cpu_int4, "known_memory", lambda *_: None)
    for one in (found, layer(x)):
        if dtype == BF16:
            assert torch.equal(one, expected)
        assert ((one - expected).abs() <= 1e-5 * expected.abs().max()).all()


@table(("bfloat16", "dtype", "crossing"), [(True, BF16, 88), (True, F32, 256), (False, BF16, 256), (False, F32, 256)])
def test_the_crossing_follows_the_processor(
    bfloat16: bool, dtype: torch.dtype, crossing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_int4, "multiplies_bfloat16", lambda: bfloat16)
    assert cpu_int4.crossing(dtype) == crossing


@pytest.mark.parametrize(
    "region",
    [Region(0, 150, 0, 320), Region(64, 64, 0, 320), Region(0, 150, 160, 160), Region(37, 1, 32, 32)],
)
@pytest.mark.parametrize("name", NAMES)
def test_shards_that_begin_inside_a_group_or_a_word(name: str, region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = held(name, REFERENCES[name].write(drawn(150, 320)), region)
    layer, x = packed_linear((weight,)), drawn(3, region.num_columns)
    expected = functional.linear(x, weight.dequantised(torch.float32))
    assert_near(layer(x), expected)
    monkeypatch.setattr(cpu_int4, "crossing", lambda _: 1)
    assert_near(layer(x), expected)


def of_groups(size: int, columns: int, region: Region | None = None) -> QuantisedWeight:
    """Random codes with a scale for *size* columns."""
    form = compressed(4, size)
    groups = -(-columns // min(size, columns))
    stored = {
        "weight_packed": torch.randint(-(2**31), 2**31, (16, columns // 8)).to(torch.int32),
        "weight_scale": torch.rand(16, groups) + 0.5,
    }
    region = region or Region(0, 16, 0, columns)
    fields = {end: stored[end][field.slices(region)] for end, field in form.fields.items()}
    return QuantisedWeight(form, fields, region)


@pytest.mark.parametrize(
    ("weight", "kernels"),
    [
        (of_groups(64, 512), 64),
        (of_groups(128, 512), 128),
        (of_groups(256, 512), 256),
        (of_groups(512, 1024), 256),
        (of_groups(WHOLE_ROW, 512), 256),
        (of_groups(WHOLE_ROW, 96), 32),
        (of_groups(128, 512, Region(0, 16, 64, 320)), 64),
    ],
)
def test_groups_longer_than_the_kernels_are_repeated(weight: QuantisedWeight, kernels: int) -> None:
    layer, x = packed_linear((weight,)), drawn(3, weight.region.num_columns)
    assert isinstance(layer.packed, CpuInt4)
    assert layer.packed.group_size == kernels
    assert_near(layer(x), functional.linear(x, weight.dequantised(torch.float32)))


@pytest.mark.parametrize(
    "weight", [of_groups(16, 64), of_groups(WHOLE_ROW, 80), of_groups(64, 128, Region(0, 16, 8, 64))]
)
def test_what_no_kernel_takes_stays_dequantised(weight: QuantisedWeight) -> None:
    layer = Linear(weight.region.num_columns, 16, bias=False)
    layer.hold("weight", (weight,))
    assert use_operations(layer, resolve("cpu", torch.float32)) == ["its groups or columns are no multiples of 32"]
    assert isinstance(layer.packed, QuantisedLinear)


def test_memory_of_a_packed_layer() -> None:
    """Half a byte for each weight, and 32 bits for each group of 32."""
    packed = packed_linear(joined("int4")).packed
    assert isinstance(packed, CpuInt4)
    num_values = INPUTS * sum(WIDTHS)
    assert packed.packed.nbytes + packed.scales_and_zeros_GP2.nbytes == num_values * (4 + 1) // 8


def test_an_unknown_layout_is_never_unpacked() -> None:
    layer, x = packed_linear(joined("int4")), drawn(300, INPUTS)
    packed = layer.packed
    assert isinstance(packed, CpuInt4)
    other = CpuInt4(
        packed.packed, packed.scales_and_zeros_GP2, packed.group_size, 0, packed.num_outputs, packed.has_zeros, None
    )
    assert_near(other.apply(x, None), layer(x))

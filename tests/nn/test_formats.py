"""Formats of quantised weights against readers that were written from their descriptions, to the bit."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.naive_quantized.base import NaiveQuantizationCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.quant_scheme import NVFP4A16
from references.formats import GROUP, REFERENCES, Tensors
from tables import table
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from weights import FORMATS, held

from saccade.nn import ops
from saccade.nn.formats import quantised
from saccade.nn.formats.fp8 import Fp8
from saccade.nn.formats.quantised import (
    WHOLE_ROW,
    Part,
    QuantisedExperts,
    QuantisedLinear,
    QuantisedWeight,
    Region,
)

SHAPES = [(7, 96), (150, 320)]
REGIONS = [Region(0, 150, 0, 320), Region(64, 64, 0, 320), Region(100, 50, 0, 320), Region(0, 150, 160, 160),
           Region(37, 1, 11, 150), Region(127, 2, 127, 2), Region(149, 1, 319, 1)]  # fmt: skip


def tensors(name: str, rows: int, columns: int, seed: int = 0) -> Tensors:
    return REFERENCES[name].write(torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)))


def read(name: str, stored: Tensors) -> torch.Tensor:
    return torch.from_numpy(REFERENCES[name].read(stored))


@table("dtype", [torch.float32, torch.bfloat16, torch.float16])
@table("shape", SHAPES)
@table("name", FORMATS)
def test_whole_weight(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    stored = tensors(name, *shape)
    found = held(name, stored, Region(0, shape[0], 0, shape[1])).dequantised(dtype)
    assert found.dtype == dtype
    assert torch.equal(found, read(name, stored).to(dtype))


@table("region", REGIONS)
@table("name", FORMATS)
def test_region_is_that_of_the_whole(name: str, region: Region) -> None:
    """Also where it begins or ends inside a block, a group, a word or a byte."""
    stored = tensors(name, 150, 320)
    row, rows, column, columns = region
    expected = read(name, stored)[row : row + rows, column : column + columns]
    assert torch.equal(held(name, stored, region).dequantised(torch.float32), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_dequantised_in_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = tensors(name, 150, 320)
    weight = held(name, stored, Region(100, 50, 0, 320))
    whole = weight.dequantised(torch.float32)
    monkeypatch.setattr(quantised, "DEQUANTISED_AT_ONCE", 7 * 320)
    assert torch.equal(weight.dequantised(torch.float32), whole)


class Launches(TorchDispatchMode):
    """Counts the operations, views among them."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", FORMATS)
def test_a_matrix_is_dequantised_at_once_beside_a_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In few launches, however large the matrix is, and with the values of the pieces."""
    stored, region = tensors(name, 1024, 1024), Region(0, 1024, 0, 1024)
    pieces = held(name, stored, region)
    on_meta = replace(pieces, fields={end: field.to("meta") for end, field in pieces.fields.items()})
    for weight in (pieces, on_meta):
        weight.dequantised(torch.bfloat16)  # its tables are made once
    with Launches() as by_pieces:
        expected = pieces.dequantised(torch.bfloat16)
    with Launches() as beside_a_cpu:
        on_meta.dequantised(torch.bfloat16)
    monkeypatch.setattr(quantised, "DEQUANTISED_AT_ONCE", 1 << 20)
    with Launches() as at_once:
        found = pieces.dequantised(torch.bfloat16)
    assert torch.equal(found, expected)
    assert max(at_once.num, beside_a_cpu.num) <= 40
    assert by_pieces.num >= 3 * at_once.num


@table("name", FORMATS)
def test_every_code(name: str) -> None:
    """All codes of four bits, all of eight but the NaNs; large and small scales, and zero."""
    stored = tensors(name, 16, 512)
    for end, values in stored.items():
        codes = (torch.arange(values.numel()) % 256).to(torch.uint8)
        if values.dtype in (torch.float8_e4m3fn, torch.uint8):
            codes[codes % 128 == 127] = 0
            stored[end] = codes.view(values.dtype).view(values.shape)
        elif values.dtype == torch.int32 and end != "g_idx":
            stored[end] = torch.randint(-(2**31), 2**31, values.shape).to(torch.int32)
        elif end in ("weight_scale", "weight_scale_inv", "scales"):
            values.view(-1)[:] = torch.tensor([2.0**-20, 3.3, 1e4, 0] * values.numel())[: values.numel()]
    found = held(name, stored, Region(0, 16, 0, 512)).dequantised(torch.float32)
    assert torch.equal(found, read(name, stored))


@table("dtype", [torch.float32, torch.bfloat16])
@table(
    ("name", "changes", "columns"),
    [
        ("int4", {}, 32),
        ("int4 zeros", {"symmetric": False}, 32),
        ("int8 rows", {"num_bits": 8, "strategy": "channel", "group_size": None}, 128),
    ],
)
def test_packed_ints_equal_compressed_tensors(
    name: str, changes: dict[str, Any], columns: int, dtype: torch.dtype
) -> None:
    """Packed and unpacked by the package that defines the format; its arithmetic is in the dtype of the scales."""
    weight = torch.randn(48, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    args = QuantizationArgs(**{**GROUP, "observer": "minmax", **changes})
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    largest = weight.view(48, -1, columns).abs().amax(-1)
    stored = {"weight": weight, "weight_scale": (largest / (2 ** (args.num_bits - 1) - 1)).to(dtype)}
    if not args.symmetric:
        zeros = torch.randint(-8, 8, stored["weight_scale"].shape, generator=torch.Generator().manual_seed(1))
        stored["weight_zero_point"] = zeros.to(torch.int8)
    packed = PackedQuantizationCompressor.compress(stored, scheme)
    expected = PackedQuantizationCompressor.decompress(packed, scheme)["weight"]
    found = held(name, packed, Region(0, 48, 0, 128)).dequantised(dtype)
    assert expected.dtype == dtype
    assert torch.equal(found, expected)


def test_packed_nvfp4_equals_compressed_tensors() -> None:
    stored = tensors("nvfp4 packed", 48, 128)
    scheme = QuantizationScheme(targets=["Linear"], **NVFP4A16)
    given = {end: value for end, value in stored.items() if end.startswith("weight")}
    codes = unpack_fp4_from_uint8(given["weight_packed"], 48, 128, dtype=torch.float32)
    scales, whole = given["weight_scale"].float(), given["weight_global_scale"]
    expected = dequantize(codes, scales, args=scheme.weights, global_scale=whole, dtype=torch.float32)
    assert torch.equal(held("nvfp4 packed", stored, Region(0, 48, 0, 128)).dequantised(torch.float32), expected)


def test_nvfp4_equals_compressed_tensors() -> None:
    """That package divides by the inverse of the weight's scale: the same for a power of two."""
    stored = tensors("nvfp4", 48, 128)
    stored["weight_scale_2"] = torch.tensor(2.0**-9)
    codes = unpack_fp4_from_uint8(stored["weight"], 48, 128, dtype=torch.float32)
    scheme = QuantizationScheme(targets=["Linear"], **NVFP4A16)
    scales, inverse = stored["weight_scale"].float(), torch.tensor(2.0**9)
    expected = dequantize(codes, scales, args=scheme.weights, global_scale=inverse, dtype=torch.float32)
    assert torch.equal(held("nvfp4", stored, Region(0, 48, 0, 128)).dequantised(torch.float32), expected)


@table("dtype", [torch.float32, torch.bfloat16])
@table("scheme", ["tensor", "channel", "block"])
def test_fp8_equals_compressed_tensors(scheme: str, dtype: torch.dtype) -> None:
    """Compressed and decompressed by the package that defines the format; its arithmetic is in the scales' dtype."""
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(0)).to(dtype)
    cells = {"tensor": (256, 384), "channel": (1, 384), "block": (128, 128)}
    rows, columns = cells[scheme]
    scale = weight.view(256 // rows, rows, 384 // columns, columns).abs().amax((1, 3)) / 448
    structure = {"block_structure": [128, 128]} if scheme == "block" else {}
    args = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy=scheme, **structure)
    scales = {"weight_scale": scale.reshape(1) if scheme == "tensor" else scale}
    stored = NaiveQuantizationCompressor.compress(
        {"weight": weight, **scales}, QuantizationScheme(targets=["Linear"], weights=args)
    )
    expected = dequantize(stored["weight"], stored["weight_scale"], args=args)
    cell = {"tensor": None, "channel": (1, WHOLE_ROW), "block": (128, 128)}[scheme]
    form, region = Fp8(cell, "weight_scale"), Region(0, 256, 0, 384)
    fields = {end: stored[end].reshape(field.shape(region)) for end, field in form.fields.items()}
    assert stored["weight"].dtype == torch.float8_e4m3fn
    assert torch.equal(QuantisedWeight(form, fields, region).dequantised(dtype), expected)


def test_transposed_blocks() -> None:
    """A weight whose tensors are those of its transpose, with blocks of two lengths."""
    draw = torch.Generator().manual_seed(0)
    stored = torch.randn(70, 300, generator=draw).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 3, generator=draw)
    form = Fp8((32, 128)).transposed()
    assert form is not None
    fields = {"weight": stored.t().contiguous(), "weight_scale_inv": scales.t().contiguous()}
    whole = stored.float() * scales.repeat_interleave(32, 0)[:70].repeat_interleave(128, 1)[:, :300]
    found = QuantisedWeight(form, fields, Region(0, 300, 0, 70)).dequantised(torch.float32)
    assert torch.equal(found, whole.t())
    assert Fp8(None, "weight_scale").transposed() == Fp8(None, "weight_scale")
    assert Fp8((1, WHOLE_ROW), "weight_scale").transposed() is None


def parts(seed: int) -> tuple[list[Part], torch.Tensor]:
    """A part of each format and a plain one, all different, and the weight that they are."""
    stored = {name: tensors(name, 10 + number, 64, seed + number) for number, name in enumerate(FORMATS)}
    made: list[Part] = [
        held(name, fields, Region(0, len(read(name, fields)), 0, 64)) for name, fields in stored.items()
    ]
    plain = torch.randn(4, 64)
    return [*made, plain], torch.cat([*(read(name, fields) for name, fields in stored.items()), plain])


def test_joined_layers_keep_their_own_scales() -> None:
    made, weight = parts(0)
    linear = QuantisedLinear(tuple(made), torch.randn(len(weight)))
    x, residual = torch.randn(3, 64), torch.randn(3, len(weight))
    expected = functional.linear(x, weight, linear.bias_O)
    assert torch.equal(linear.dequantised(torch.float32), weight)
    assert torch.equal(linear.apply(x, None), expected)
    assert torch.equal(linear.apply(x, ops.SILU), functional.silu(expected))
    assert torch.equal(linear.add_to(residual, x), residual + expected)


@pytest.mark.parametrize("name", FORMATS)
def test_only_chosen_experts_are_dequantised(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    num_experts, hidden, intermediate = 6, 64, 32

    def experts(rows: int, columns: int, seed: int) -> tuple[QuantisedExperts, torch.Tensor]:
        """Two parts, as gate and up are."""
        region = Region(0, rows, 0, columns)
        stored = [[tensors(name, rows, columns, 100 * part + seed + number) for number in range(6)] for part in (0, 1)]
        weights = [[held(name, one, region) for one in part] for part in stored]
        stacked = tuple(
            replace(part[0], fields={end: torch.stack([one.fields[end] for one in part]) for end in part[0].fields})
            for part in weights
        )
        whole = torch.stack([torch.cat([read(name, stored[part][number]) for part in (0, 1)]) for number in range(6)])
        return QuantisedExperts(stacked, num_experts, torch.float32), whole

    (gate_up, plain_gate_up), (down, plain_down) = (
        experts(intermediate, hidden, 0),
        experts(hidden // 2, intermediate, 50),
    )
    asked: list[int] = []
    expert = QuantisedWeight.expert
    monkeypatch.setattr(QuantisedWeight, "expert", lambda self, index: asked.append(index) or expert(self, index))
    x, ids, weights = torch.randn(5, hidden), torch.tensor([[1, 4]] * 4 + [[4, 1]]), torch.rand(5, 2)
    expected = ops.experts(x, plain_gate_up, plain_down, ids, weights)
    assert torch.equal(ops.experts(x, gate_up, down, ids, weights), expected)
    assert sorted(set(asked)) == [1, 4]
    assert len(asked) == 2 * 2 * 2  # experts, matrices, parts

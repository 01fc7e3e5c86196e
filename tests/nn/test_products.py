"""Kernels for quantised weights, played on a CPU, against the dequantised weights; what they decline, and their bytes."""

import dataclasses
import re
import sys
from collections.abc import Callable, Hashable
from types import ModuleType

import published_products
import pytest
import torch
from products import (
    BF16,
    BLACKWELL,
    CHOICES,
    EXPERTS,
    GPU_FORMATS,
    HIDDEN,
    HOPPER,
    INPUTS,
    WIDTHS,
    drawn,
    experts_of,
    joined,
    layer_of,
)  # fmt: skip
from references.formats import REFERENCES
from tables import table
from torch._subclasses import FakeTensorMode
from weights import FORMATS, held

from saccade.nn import ops
from saccade.nn.experts import Experts
from saccade.nn.formats import torch_products
from saccade.nn.formats.fp8 import rounded
from saccade.nn.formats.quantised import QuantisedExperts, QuantisedLinear, QuantisedWeight, Region
from saccade.nn.layers import Layer, Linear, use_operations
from saccade.nn.libraries import Unavailable
from saccade.nn.ops import ExpertShare, JoinedLinear, Operations, PlainLinear, resolve
from saccade.nn.parallel import Ranks

TOLERANCE = {"fp8_blocks": 0.06, "fp8_rows": 0.06, "int4": 0.02, "nvfp4": 0.3}
"""Of the largest result: activations are rounded to eight or four bits; INT4 rounds scales to bfloat16."""


def num_bytes(held: object) -> int:
    if isinstance(held, torch.Tensor):
        return held.nbytes
    if isinstance(held, QuantisedWeight):
        return sum(num_bytes(field) for field in held.fields.values())
    values = held if isinstance(held, list | tuple) else vars(held).values() if hasattr(held, "__dict__") else ()
    return sum(num_bytes(value) for value in values)


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert actual.dtype == expected.dtype
    assert (actual.float() - expected.float()).abs().max() <= tolerance * expected.float().abs().max()


@table("num_tokens", [1, 7])
@pytest.mark.parametrize(("name", "capability"), GPU_FORMATS)
def test_products(name: str, capability: tuple[int, int], num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    published_products.install(monkeypatch, capability)
    layer, twin = layer_of(name), layer_of(name)
    released = num_bytes(twin.packed)
    assert use_operations(layer, resolve("cuda", BF16)) == []
    assert not isinstance(layer.packed, QuantisedLinear)
    x, residual = drawn(num_tokens, INPUTS).to(BF16), drawn(num_tokens, sum(WIDTHS), seed=1).to(BF16)
    tolerance = TOLERANCE[FORMATS[name].kind]
    close(layer(x, ops.SILU), twin(x, ops.SILU), tolerance)
    close(layer.add_to(residual, x), twin.add_to(residual, x), tolerance)
    # What a step reads. Of symmetric INT4 it has a zero of 16 bits besides the scale of each group of 32: 5 bits for 4.5.
    assert num_bytes(layer.packed) <= (5 / 4.5 if name == "int4" else 1.1) * released


@pytest.mark.parametrize(
    ("device", "names"),
    [("cuda", ("fp8", "", "awq")), ("cpu", ("int4", "w8a8", "int8 rows")), ("cpu", ("awq", "", "w8a8"))],
)
def test_joined_layers_of_several_formats(device: str, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is multiplied in its own; "" is a plain layer."""
    if device == "cuda":
        published_products.install(monkeypatch, HOPPER)
    values = [drawn(width, INPUTS, seed=width) * INPUTS**-0.5 for width in WIDTHS]
    parts = tuple(joined(name)[place] if name else values[place].to(BF16) for place, name in enumerate(names))
    layer, twin = (Linear(INPUTS, WIDTHS).to(BF16) for _ in range(2))
    for one in (layer, twin):
        one.bias.data = drawn(sum(WIDTHS), seed=5).to(BF16)
        one.hold("weight", parts)
    operations = dataclasses.replace(ops.PLAIN, kernels=resolve(device, BF16).kernels)
    assert use_operations(layer, operations) == []
    assert isinstance(layer.packed, JoinedLinear)
    assert len(layer.packed.layers) == 3
    x, residual = drawn(7, INPUTS).to(BF16), drawn(7, sum(WIDTHS), seed=1).to(BF16)
    close(layer(x, ops.SILU), twin(x, ops.SILU), 0.06)
    close(layer.add_to(residual, x), twin.add_to(residual, x), 0.06)


def test_joined_layers_compile_the_kernels_of_all() -> None:
    class Compiled(PlainLinear):
        def kernels(self, most_tokens: int) -> dict[Hashable, int]:
            return {(len(self.weight_OI), most_tokens): 1}

    layers = tuple(Compiled(drawn(rows, 8), None) for rows in (3, 3, 4))
    assert JoinedLinear(layers).kernels(64) == {(3, 64): 1, (4, 64): 1}


def test_torch_takes_these_shapes_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own functions without values, as on a GPU."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: HOPPER)
    for name in ("awq", "fp8 rows"):
        stored = joined(name)
        with FakeTensorMode():
            parts = tuple(
                dataclasses.replace(
                    part,
                    fields={
                        end: torch.empty(field.shape, dtype=field.dtype, device="cuda")
                        for end, field in part.fields.items()
                    },
                )
                for part in stored
            )
            product = torch_products.pack_linear(QuantisedLinear(parts, None))
            output = product.apply(torch.empty(3, INPUTS, dtype=BF16, device="cuda"), None)
        assert (output.shape, output.dtype, output.device.type) == ((3, sum(WIDTHS)), BF16, "cuda")


@pytest.mark.parametrize(
    ("name", "capability", "reason"),
    [
        ("fp8", (8, 0), "compute capabilities 9.x, 10.x, 12.x, not 8.0"),
        ("fp8 rows", (8, 0), "compute capability 8.9"),
        ("awq", (7, 5), "compute capability 8.0"),
        ("nvfp4", HOPPER, "needs a Blackwell GPU"),
        ("int8 rows", HOPPER, "no kernel takes w8a16"),
    ],
)
def test_a_gpu_without_a_kernel_dequantises(
    name: str, capability: tuple[int, int], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    published_products.install(monkeypatch, capability)
    layer = layer_of(name)
    (found,) = use_operations(layer, resolve("cuda", BF16))
    assert reason in found
    assert isinstance(layer.packed, QuantisedLinear)


def part_of(name: str, rows: int, columns: int, region: Region) -> QuantisedWeight:
    return held(name, REFERENCES[name].write(drawn(rows, columns, seed=rows)), region)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([part_of("fp8", 256, 256, Region(64, 128, 0, 256))], "whole cells of 128 x 128"),
        ([part_of("fp8", 256, 320, Region(0, 256, 0, 320))], "whole cells of 128 x 128"),
        ([part_of("fp8", 72, 256, Region(0, 72, 0, 256))], "multiple of 64"),
        ([part_of("fp8 rows", 72, 256, Region(0, 72, 0, 256))], "multiples of 16"),
        ([part_of("awq", 64, 320, Region(0, 64, 0, 320))], "whole cells of 1 x 128"),
        ([part_of("awq", 40, 256, Region(0, 36, 0, 256))], "fit no tile"),
        ([part_of("nvfp4", 40, 256, Region(0, 40, 0, 256))], "multiples of 32"),
        ([part_of("nvfp4", 64, 64, Region(0, 64, 0, 64)), part_of("nvfp4", 128, 64, Region(0, 128, 0, 64))], "different scales"),
    ],
)  # fmt: skip
def test_weights_that_no_kernel_takes(
    parts: list[QuantisedWeight], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    published_products.install(monkeypatch, BLACKWELL)
    layer = Linear(256, 256, bias=False).to(BF16)
    layer.hold("weight", tuple(parts))
    (found,) = use_operations(layer, resolve("cuda", BF16))
    assert reason in found


def test_activations_without_a_scale_keep_nvfp4_dequantised(monkeypatch: pytest.MonkeyPatch) -> None:
    published_products.install(monkeypatch, BLACKWELL)
    part = part_of("nvfp4", 64, 64, Region(0, 64, 0, 64))
    fields = {end: field for end, field in part.fields.items() if end != "input_scale"}
    layer = Linear(64, 64, bias=False).to(BF16)
    layer.hold("weight", (dataclasses.replace(part, fields=fields),))
    assert use_operations(layer, resolve("cuda", BF16)) == ["the checkpoint has no scale of its activations"]
    assert layer(torch.ones(1, 64, dtype=BF16)).shape == (1, 64)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ImportError("No module named 'flashinfer'"), "it is not installed (No module named 'flashinfer')"),
        (OSError("so: undefined symbol: _ZN3c10"), "it was compiled for another torch than"),
        (RuntimeError("nvcc failed"), "its library fails ("),
    ],
)
def test_a_library_that_fails_at_its_first_call_is_not_used(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    published_products.install(monkeypatch, HOPPER)

    def failing(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(sys.modules["flashinfer.gemm"], "fp8_blockscale_gemm_sm90", failing)
    layer = layer_of("fp8")
    (found,) = use_operations(layer, resolve("cuda", BF16))
    assert found.startswith(reason)
    assert layer(drawn(2, INPUTS).to(BF16)).shape == (2, sum(WIDTHS))


@pytest.mark.parametrize("make", [layer_of, experts_of])
def test_deepgemm_is_not_called_without_nvcc(make: Callable[[str], Layer], monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the process at a kernel that it can neither find nor compile."""
    published_products.install(monkeypatch, HOPPER, nvcc=None)
    (found,) = use_operations(make("fp8"), resolve("cuda", BF16))
    assert found.startswith("nvcc compiles its kernels, and is not found")


def test_a_library_that_cannot_be_imported_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    published_products.install(monkeypatch, HOPPER)
    monkeypatch.setitem(sys.modules, "flashinfer.gemm", ModuleType("flashinfer.gemm"))
    (found,) = use_operations(layer_of("fp8"), resolve("cuda", BF16))
    assert found.startswith("it is not installed (cannot import name")


@pytest.mark.parametrize(
    ("name", "capability"), [("fp8", HOPPER), ("fp8", BLACKWELL), ("nvfp4", BLACKWELL), ("int4", BLACKWELL)]
)
@table("num_ranks", [1, 2])
def test_experts(name: str, capability: tuple[int, int], num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    published_products.install(monkeypatch, capability)
    monkeypatch.setattr(Ranks, "all_reduce", lambda _, x: x)
    x, scores = drawn(5, HIDDEN).to(BF16), drawn(5, EXPERTS, seed=3).softmax(-1)
    weights, ids = scores.topk(CHOICES, -1)
    for rank in range(num_ranks):
        layer, twin = experts_of(name, rank, num_ranks), experts_of(name, rank, num_ranks)
        released = sum(num_bytes(matrices.parts) for matrices in twin.quantised.values())
        assert use_operations(layer, resolve("cuda", BF16)) == []
        assert layer.quantised == {}
        close(layer(x, ids, weights), twin(x, ids, weights), 0.1)
        assert num_bytes(layer.packed) <= 1.1 * released


@table(
    ("name", "capability", "words"),
    [
        ("int8 rows", BLACKWELL, "no kernel takes w8a16"),
        ("int4", HOPPER, "on Blackwell alone .* that for Hopper takes groups of 128 and rounds activations to FP8"),
        ("int4 zeros", BLACKWELL, "takes groups of 32 without zero points"),
        ("gptq", BLACKWELL, "takes groups of 32 without zero points"),
    ],
)
def test_experts_that_no_kernel_takes(
    name: str, capability: tuple[int, int], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    published_products.install(monkeypatch, capability)
    layer = experts_of(name)
    (reason,) = use_operations(layer, resolve("cuda", BF16))
    assert re.search(words, reason)
    assert set(layer.quantised) == {"gate_up_proj", "down_proj"}


def test_formats_without_a_kernel_on_a_cpu() -> None:
    assert resolve("cpu", torch.float16).kernels == {} == resolve("cuda", torch.float16).kernels
    assert {kind for _, kind in resolve("cpu", BF16).kernels} == {"int4", "int8", "w8a16"}
    layer = layer_of("fp8")
    assert use_operations(layer, Operations()) == ["no kernel takes fp8_blocks"]


@table("shape", [(128, 128), (200, 300), (1, 1)])
def test_rounding_to_fp8(shape: tuple[int, int]) -> None:
    weight = drawn(3, *shape)
    weight[1] = 0
    found = rounded(weight)
    for expert in range(3):
        values = found.expert(expert).dequantised(torch.float32)
        # Three bits of mantissa.
        assert ((values - weight[expert]).abs() <= weight[expert].abs() / 16 + weight.abs().max() / 448 / 500).all()
    assert torch.equal(rounded(weight[0]).dequantised(BF16), found.expert(0).dequantised(BF16))


def test_layers_and_experts_round_to_fp8_what_is_large() -> None:
    large, small, changed = Linear(256, 128), Linear(256, (128, 64)), Linear(256, 128)
    changed.is_as_stored = False
    assert [layer.is_worth_rounding for layer in (large, small, changed)] == [True, False, False]
    large.weight.data = drawn(*large.weight.shape)
    expected = large.weight.data
    large.round_weight(rounded)
    assert large.packed is not None
    close(large.dequantised(), expected, 0.07)
    experts = Experts(2, 128, 256)
    for parameter in experts.parameters():
        parameter.data = drawn(*parameter.shape)
    gate_up = experts.gate_up_proj.data
    experts.round_to_fp8()
    assert isinstance(experts.quantised["gate_up_proj"], QuantisedExperts)
    close(experts.quantised["gate_up_proj"][1], gate_up[1], 0.07)
    assert experts.share == ExpertShare(2, 0, 1)
    with pytest.raises(Unavailable):
        experts.pack()

"""Saccade's calls of FlashInfer's products with quantised weights: bound to its releases, and equal to its references."""

import itertools
import sys
from collections.abc import Callable
from typing import Any

import published_delta
import published_products
import pytest
import torch
from libraries import Library
from products import BF16, BLACKWELL, CHOICES, EXPERTS, HIDDEN, HOPPER, INPUTS, drawn, experts_of, layer_of

from saccade.nn.delta_rule import Gates, Trail
from saccade.nn.layers import use_operations
from saccade.nn.ops import OF_STATES, resolve

pytestmark = pytest.mark.real
TEMPLATES = "flashinfer.trace.templates"
NAMES = {
    f"{module}.{function.__name__}"
    for module, functions in published_products.MODULES.items()
    for function in functions
}
CASES = [("fp8", HOPPER), ("fp8", BLACKWELL), ("nvfp4", BLACKWELL), ("nvfp4 packed", BLACKWELL)]
"""All that FlashInfer multiplies, and where."""


@pytest.fixture
def calls(
    flashinfer: Library, monkeypatch: pytest.MonkeyPatch
) -> Callable[[tuple[int, int]], dict[str, dict[str, Any]]]:
    """A function that plays the library on a GPU; it returns the last arguments of each call, which is bound first."""

    def install(capability: tuple[int, int]) -> dict[str, dict[str, Any]]:
        published_products.install(monkeypatch, capability)
        found: dict[str, dict[str, Any]] = {}
        for name in NAMES:
            module, _, function = name.rpartition(".")
            monkeypatch.setattr(
                sys.modules[module], function, _bound(flashinfer, name, found, getattr(published_products, function))
            )
        return found

    return install


def _bound(
    library: Library, name: str, found: dict[str, dict[str, Any]], played: Callable[..., Any]
) -> Callable[..., Any]:
    call = library.call(name)

    def bound(*args: Any, **kwargs: Any) -> Any:
        call.bind(*args, **kwargs)
        found[name] = dict(call.signature.bind(*args, **kwargs).arguments)
        return played(*args, **kwargs)

    return bound


Calls = Callable[[tuple[int, int]], dict[str, dict[str, Any]]]


@pytest.mark.parametrize(("name", "capability"), CASES)
def test_linear_layers(name: str, capability: tuple[int, int], calls: Calls, flashinfer: Library) -> None:
    found = calls(capability)
    layer = layer_of(name)
    assert use_operations(layer, resolve("cuda", BF16)) == []
    output = layer(drawn(5, INPUTS).to(BF16)) - layer.bias
    if name != "fp8":
        arguments = found["flashinfer.mm_fp4"]
        assert arguments["a"].shape == (5, INPUTS // 2)
        rows, groups = len(output[0]), INPUTS // 16
        plain = flashinfer.run(f"{TEMPLATES}.gemm._unswizzle_sf_128x4")(arguments["b_descale"].t(), rows, groups)
        scales = plain.view(torch.float8_e4m3fn)
        values = flashinfer.run(f"{TEMPLATES}.moe._dequantize_fp4_tensor")(arguments["b"].t(), scales, False)
        twin = layer_of(name).dequantised()
        input_scale = 0.01
        torch.testing.assert_close((values * arguments["alpha"] / input_scale).to(BF16), twin, rtol=2**-7, atol=1e-6)
        return
    hopper, other = "flashinfer.gemm.fp8_blockscale_gemm_sm90", "flashinfer.gemm.gemm_fp8_nt_groupwise"
    (key,) = found
    assert key == (hopper if capability == HOPPER else other)
    expected = flashinfer.run(f"{TEMPLATES}.gemm._{key.rpartition('.')[2]}_reference")(**found[key])[:5]
    # On Hopper the reference does not round activations.
    assert (output - expected).abs().max() <= (0.06 if capability == HOPPER else 0.02) * expected.abs().max()


@pytest.mark.parametrize(("name", "capability"), [*CASES[:3], ("int4", BLACKWELL)])
def test_experts(name: str, capability: tuple[int, int], calls: Calls, flashinfer: Library) -> None:
    found = calls(capability)
    layer, twin = experts_of(name), experts_of(name)
    assert use_operations(layer, resolve("cuda", BF16)) == []
    x = drawn(5, HIDDEN).to(BF16)
    weights, ids = drawn(5, EXPERTS, seed=3).softmax(-1).topk(CHOICES, -1)
    output = layer(x, ids, weights)
    (key,) = (one for one in found if one.endswith("_moe"))
    routed = {"fp8": "trtllm_fp8_block_scale_routed_moe", "int4": "trtllm_mxint4_block_scale_routed_moe"}
    expected_key = routed.get(name, "cutlass_fused_moe") if capability == BLACKWELL else "cutlass_fused_moe"
    assert key == f"flashinfer.fused_moe.{expected_key}"
    gate_up, down = (torch.stack([*map(twin.quantised[one].__getitem__, range(EXPERTS))]) for one in twin.experts)
    ups_first = torch.cat(gate_up.chunk(2, 1)[::-1], 1)
    reference = flashinfer.run(f"{TEMPLATES}.moe._cutlass_fused_moe_reference")
    expected = reference(x, ids, weights, ups_first, down)
    assert (output - expected).abs().max() <= 0.1 * expected.abs().max()


def test_kernels_of_the_delta_rule(flashinfer: Library) -> None:
    """The start's trial meets all that these rules tell apart, so they must be the library's own."""
    kernels = "flashinfer.gdn_kernels"
    tile_of = flashinfer.run(f"{kernels}.gdn_decode_mtp.get_mtp_config")
    shares_sequences = flashinfer.run(f"{kernels}.delta_rule_dsl.varlen_helper.should_use_cp_host")
    for heads, count in itertools.product((2, 4, 8, 32, 48, 64), range(1, 300)):
        for length in range(2, 9):
            expected = length, *tile_of(count, length, heads, 128, False), count * heads <= 128
            assert published_delta.proposals_kernel(count, length, heads) == expected
        for num_sms in (132, 114, 78):
            expected = shares_sequences(count * heads, num_sms, "NVIDIA H100", HOPPER)
            assert published_delta.chunk_kernel(count, heads, num_sms) == expected
    source = (flashinfer.root / "flashinfer" / "gdn_kernels" / "gdn_decode_mtp.py").read_text()
    assert "use_inline_kernel = (B * HV) <= 128" in source


@pytest.mark.parametrize(
    ("lengths", "trail"), [((1, 1), None), ((1, 70), None), ((3, 3), torch.tensor([[3, 4, 2], [5, 6, 0]]))]
)
def test_delta_rule(
    lengths: tuple[int, ...], trail: Trail, flashinfer: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    published_delta.install(monkeypatch)
    found: dict[str, dict[str, Any]] = {}
    for module, functions in published_delta.MODULES.items():
        for function in functions:
            bound = _bound(flashinfer, f"{module}.{function.__name__}", found, function)
            monkeypatch.setattr(sys.modules[module], function.__name__, bound)
    heads, width = 4, 128
    q, k, v = (drawn(sum(lengths), heads, width, seed=seed).to(BF16) for seed in range(3))
    b, a = drawn(sum(lengths), 2 * heads).to(BF16).chunk(2, -1)
    gates = Gates(0.1 * drawn(heads), drawn(heads), a, b)
    states = drawn(7, heads, width, width)
    before = states.clone()
    rows = torch.tensor([2, 0], dtype=torch.int32)
    output = resolve("cuda", BF16, OF_STATES).gated_delta_rule(q, k, v, gates, states, rows, lengths, trail)
    unit_q, unit_k = (x * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    borders = torch.tensor([0, *lengths]).cumsum(0).int()
    reference = flashinfer.run(f"{TEMPLATES}.gdn._gdn_prefill_reference")
    expected, after = reference(
        unit_q, unit_k, v, before[rows], gates.rate_log_H, a.float(), gates.bias_H, b.float(), borders, None
    )
    assert len(found) == 1
    torch.testing.assert_close(output.float(), expected.float(), atol=0.03, rtol=0.03)
    torch.testing.assert_close(states[rows], after, atol=0.03, rtol=0.03)

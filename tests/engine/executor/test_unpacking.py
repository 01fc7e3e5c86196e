"""Weights that no kernel takes: dequantised once if memory allows it, and else at each use, with the same values."""

from pathlib import Path

import engines
import pytest
import torch
from checkpoints.quantised import quantise
from products import drawn, experts_of, joined, layer_of
from tables import table

from saccade.config import GIB
from saccade.engine.executor import unpacking
from saccade.nn.experts import Experts
from saccade.nn.formats.quantised import QuantisedLinear
from saccade.nn.layers import Linear, use_operations
from saccade.nn.ops import resolve


@pytest.fixture(scope="module", params=["fp8", pytest.param("nvfp4", marks=pytest.mark.ci), "gptq int8"])
def pair(
    request: pytest.FixtureRequest, tiny_qwen3_vl: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A checkpoint in a format without a kernel, and its twin with plain weights."""
    folder = tmp_path_factory.mktemp(request.param)
    return quantise(tiny_qwen3_vl, request.param, lambda name: "layers." in name and "norm" not in name, folder)


def logits_of(subject: engines.Engine, folder: Path) -> torch.Tensor:
    logits = engines.record_logits(subject)
    engines.drain(subject, engines.request(folder, [5, ((96, 64), 1), 9]))
    return torch.stack(logits["a"])


@table(
    ("free", "is_once", "words"),
    [
        (100 * GIB, True, "layers without a kernel are held in float32, which takes 0.0 GiB more"),
        (2 * GIB, False, "layers without a kernel are dequantised at each use, which is slow. With "),
    ],
)
def test_both_ways_have_the_same_logits(
    free: int, is_once: bool, words: str, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpacking, "free_bytes", lambda: free)
    quantised, plain = pair
    subject = engines.engine(quantised)
    layers = [layer for layer in engines.module(subject).modules() if isinstance(layer, Linear)]
    assert any(isinstance(layer.packed, QuantisedLinear) for layer in layers) is not is_once
    assert words in subject.description.weight_formats
    found, expected = logits_of(subject, quantised), logits_of(engines.engine(plain), plain)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_the_growth_of_a_layer() -> None:
    """In bfloat16, FP8 takes twice as much, without its scales."""
    layer = layer_of("fp8")
    use_operations(layer, resolve("cpu", torch.bfloat16))
    values = layer.dequantised().clone()
    scales = sum(part.fields["weight_scale_inv"].nbytes for part in joined("fp8"))
    assert layer.growth_as_plain == values.numel() - scales
    layer.make_plain()
    assert layer.growth_as_plain == 0
    assert torch.equal(layer.weight, values)


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_experts_become_plain(name: str) -> None:
    layer, twin = experts_of(name), experts_of(name)
    held = sum(part.nbytes for matrices in layer.quantised.values() for part in matrices.parts)
    growth = layer.growth_as_plain
    layer.make_plain()
    assert isinstance(layer, Experts)
    assert (layer.quantised, layer.growth_as_plain) == ({}, 0)
    assert growth + held == layer.gate_up_proj.nbytes + layer.down_proj.nbytes
    x, ids = drawn(3, layer.gate_up_proj.shape[2]).bfloat16(), torch.tensor([[0, 3], [1, 2], [2, 0]])
    assert torch.equal(layer(x, ids, torch.full((3, 2), 0.5)), twin(x, ids, torch.full((3, 2), 0.5)))

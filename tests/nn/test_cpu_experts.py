"""Mixtures of experts in int8 and int4 on a CPU, near the dequantised ones."""

import pytest
import torch
from products import CHOICES, EXPERTS, HIDDEN, drawn, experts_of
from tables import table
from weights import FORMATS

from saccade.nn.formats.cpu_experts import CpuExperts
from saccade.nn.formats.cpu_int4 import CpuInt4
from saccade.nn.formats.cpu_int8 import CpuInt8
from saccade.nn.formats.onednn_int8 import Int8Product
from saccade.nn.layers import use_operations
from saccade.nn.ops import resolve
from saccade.nn.parallel import Ranks

KERNELS = {"int4": CpuInt4, "int8": Int8Product, "w8a16": CpuInt8}
NAMES = [name for name, form in FORMATS.items() if form.kind in KERNELS and name != "gptq int8"]
TOLERANCE = {"int4": 0.02, "int8": 0.05, "w8a16": 0.01}
"""Of the largest result: activations are rounded to eight bits, or scales to bfloat16."""


@table("num_ranks", [1, 2])
@table("num_tokens", [0, 1, 5, 300])
@pytest.mark.parametrize("name", NAMES)
def test_experts(name: str, num_tokens: int, num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "all_reduce", lambda _, x: x)
    x, scores = drawn(num_tokens, HIDDEN).bfloat16(), drawn(num_tokens, EXPERTS, seed=3).softmax(-1)
    weights, ids = scores.topk(CHOICES, -1)
    for rank in range(num_ranks):
        layer, twin = experts_of(name, rank, num_ranks), experts_of(name, rank, num_ranks)
        assert use_operations(layer, resolve("cpu", torch.bfloat16)) == []
        assert layer.quantised == {}
        assert isinstance(layer.packed, CpuExperts)
        kernel = KERNELS[FORMATS[name].kind]
        assert all(isinstance(matrix, kernel) for matrix in layer.packed.gate_up + layer.packed.down)
        found, expected = layer(x, ids, weights), twin(x, ids, weights)
        assert (found.dtype, found.shape) == (torch.bfloat16, (num_tokens, HIDDEN))
        if num_tokens:
            close = TOLERANCE[FORMATS[name].kind] * expected.abs().max()
            assert ((found - expected).abs() <= close).all()


def test_experts_that_no_kernel_takes_stay_dequantised() -> None:
    layer = experts_of("gptq int8")
    assert use_operations(layer, resolve("cpu", torch.bfloat16)) == [
        "no kernel takes eight bits in groups of 32 columns"
    ]
    assert set(layer.quantised) == {"gate_up_proj", "down_proj"}

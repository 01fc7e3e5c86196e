"""The bytes of weights that a step with one token reads, in each format."""

from collections.abc import Callable
from pathlib import Path

import engines
import pytest
import torch

from saccade.cli.bundled import bundled
from saccade.engine.executor.step_bytes import packed_bytes, step_bytes
from saccade.nn.layers import Linear
from saccade.nn.ops import JoinedLinear, PlainLinear


def test_plain_layers_count_with_all_bytes(tiny_qwen3_vl: Path) -> None:
    network = engines.module(engines.engine(tiny_qwen3_vl))
    of_text = network.language_model.modules()
    linear = sum(layer.weight.numel() for layer in of_text if isinstance(layer, Linear))
    head = network.language_model.embedding_VE.numel()
    assert step_bytes(network) == 4 * (linear + head)


@pytest.mark.ci
def test_rounded_layers_count_with_fewer() -> None:
    plain, int8, int4 = (
        engines.engine(bundled("model"), quantization=choice).description.step_bytes
        for choice in (None, "int8", "int4")
    )
    assert plain / 4 < int8 < plain / 3.5
    assert plain / 8 < int4 < int8


def test_a_mixture_of_experts_does_not_tell(network_folder: Callable[[str], Path]) -> None:
    assert engines.engine(network_folder("qwen3_vl_moe")).description.step_bytes == 0


def test_joined_layers_count_each_part() -> None:
    """Queries, keys and values may be in different formats."""
    first, second = PlainLinear(torch.zeros(4, 8), None), PlainLinear(torch.zeros(2, 8), torch.zeros(2))
    assert packed_bytes(JoinedLinear((first, second))) == packed_bytes(first) + packed_bytes(second) > 0

"""The bytes of weights that a step with one token reads, in each format."""

from collections.abc import Callable
from pathlib import Path

import engines
import pytest

from saccade.cli.bundled import bundled
from saccade.engine.executor.step_bytes import step_bytes
from saccade.nn.layers import Linear


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

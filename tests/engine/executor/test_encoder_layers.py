"""The vision encoder layer by layer: the same bits in every family, and as many pauses as the spec has layers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import engines
import pytest
import torch

from saccade.engine.config import EngineConfig
from saccade.engine.executor.execution import prepare
from saccade.engine.executor.loader import load_model
from saccade.models.spec import MediaShape
from saccade.nn.layerwise import advance, complete

EVERYDAY = ["qwen3_vl", "qwen2_5_vl", "kimi_k25", "internvl", "phi3_v"]
CASES = [pytest.param(name, marks=() if name in EVERYDAY else pytest.mark.conformance) for name in checkpoints.NETWORKS]


@pytest.mark.parametrize("name", CASES)
def test_pauses_change_no_bit(name: str, network_folder: Callable[[str], Path]) -> None:
    folder = network_folder(name)
    model = load_model(EngineConfig(str(folder), "tiny", device="cpu", dtype="float32"), lambda *_: None)
    backend = prepare(EngineConfig(str(folder), "tiny", device="cpu", dtype="float32"), model).vision_backend
    network: Any = model.network

    def begin(seed: int) -> Any:
        item = engines.photo(folder, (150, 100), seed)
        pixels = torch.frombuffer(bytearray(item.inline or b""), dtype=torch.uint8)
        return network.encode(pixels, network.prepare([MediaShape(item.grid, item.original_size)], backend))

    with torch.inference_mode():
        expected = [complete(begin(seed)) for seed in (1, 2)]
        # Two images in turns: neither sees the state of the other.
        one, other = begin(1), begin(2)
        for _ in range(network.spec.num_encoder_layers):
            assert advance(one, 1) is None
            assert advance(other, 1) is None
        assert torch.equal(expected[0], complete(one))
        assert torch.equal(expected[1], complete(other))

"""Every family's vision tower gives its attention all that any backend reads, for every block. C1, [eng] 34"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
from checkpoints import NETWORKS
from tables import table
from vision_backends import FIELDS, RecordingBackend, UnusedBackend

from saccade.engine.config import EngineConfig
from saccade.engine.executor.loader import load_model
from saccade.models.spec import MediaShape
from saccade.nn import vision
from saccade.nn.context import PackedLayout
from saccade.nn.layerwise import complete
from saccade.protocol.media import MediaItem

SIZES = [(150, 100), (64, 200), (300, 61)]
TOWERS = [name for name in NETWORKS if name != "gemma4_unified"]
"""The checkpoints with a vision tower."""


@pytest.fixture(scope="module")
def load(network_folder: Callable[[str], Path]) -> Callable[[str], Any]:
    """The loaded network of a tiny checkpoint, by its name."""
    return cache(
        lambda name: load_model(EngineConfig(str(network_folder(name)), "tiny", device="cpu"), _silent).network
    )


def _silent(*_: Any) -> None:
    pass


@pytest.fixture(scope="module", params=TOWERS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def items(name: str, network_folder: Callable[[str], Path]) -> list[MediaItem]:
    return [engines.photo(network_folder(name), size, seed) for seed, size in enumerate(SIZES)]


def shapes(items: list[MediaItem]) -> list[MediaShape]:
    return [MediaShape(item.grid, item.original_size) for item in items]


@torch.inference_mode()
def test_every_block_gets_the_metadata(name: str, items: list[MediaItem], load: Callable[[str], Any]) -> None:
    network, backend = load(name), RecordingBackend()
    pixels = torch.frombuffer(bytearray(b"".join(item.inline or b"" for item in items)), dtype=torch.uint8)
    metadata = network.prepare(shapes(items), backend)
    complete(network.encode(pixels, metadata))
    assert len(backend.layouts) == num_blocks(network)


def num_blocks(network: torch.nn.Module) -> int:
    """The length of the longest list of layers beside the text decoder's."""
    lists = {path: module for path, module in network.named_modules() if isinstance(module, torch.nn.ModuleList)}
    return max(len(layers) for path, layers in lists.items() if not path.startswith("language_model."))


@table("dropped", FIELDS)
def test_a_dropped_field_is_named_before_the_launch(
    name: str, items: list[MediaItem], load: Callable[[str], Any], dropped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(*values: Any) -> PackedLayout:
        return PackedLayout(**{**dict(zip(FIELDS, values, strict=True)), dropped: None})

    monkeypatch.setattr(vision, "PackedLayout", without)
    with pytest.raises(ValueError, match=dropped):
        load(name).prepare(shapes(items), UnusedBackend())

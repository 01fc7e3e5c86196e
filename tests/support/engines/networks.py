"""Networks of tiny checkpoints, loaded or without weights, and the comparison of towers with transformers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import engines
import torch

from saccade import models
from saccade.engine.config import EngineConfig
from saccade.engine.executor.loader import load_model
from saccade.models.spec import MediaShape
from saccade.nn.backends.torch_sdpa import VisionAttentionBackend
from saccade.nn.layerwise import complete
from saccade.nn.parallel import ALONE, Ranks


def load(folder: Path, ranks: Ranks = ALONE, dtype: str = "float32") -> Any:
    """The loaded network of a checkpoint."""
    config = EngineConfig(str(folder), "tiny", device="cpu", dtype=dtype)
    return load_model(config, lambda *_: None, ranks).network


def config_of(folder: Path) -> Any:
    """A checkpoint's config.json."""
    return json.loads((folder / "config.json").read_text())


def with_value(config: Any, path: str, value: object) -> Any:
    """The config with *value* at *path*, keys joined by dots."""
    *parents, last = path.split(".")
    place = config
    for parent in parents:
        place = place[parent]
    place[last] = value
    return config


def build(config: Any, preprocessor: Any = None) -> Any:
    """The network that a config.json and a preprocessor_config.json describe, without memory."""
    family = models.family_of(config)
    with torch.device("meta"):
        return models.load_network(family)(models.load_spec(family, config), config, preprocessor or {})


def tokens_of(network: Any, items: Sequence[MediaShape]) -> list[int]:
    """How many tokens each item has."""
    return [network.spec.item_tokens(item.grid, item.original_size) for item in items]


@torch.inference_mode()
def check_features(
    oracle: Any, folder: Path, sizes: Sequence[tuple[int, int]], network: Any = None, atol: float = 1e-5
) -> None:
    """Features of images of *sizes* (width, height), encoded together, equal transformers', deepstack's too."""
    network = network or load(folder)
    items = [engines.photo(folder, size, seed) for seed, size in enumerate(sizes)]
    shapes = [MediaShape(item.grid, item.original_size) for item in items]
    metadata = network.prepare(shapes, VisionAttentionBackend())
    pixels = torch.frombuffer(bytearray(b"".join(item.inline or b"" for item in items)), dtype=torch.uint8)
    expected = oracle.model.model.get_image_features(**oracle.images(items), return_dict=True)
    parts = [expected.pooler_output, *(getattr(expected, "deepstack_features", None) or ())]
    of_tokens = [torch.cat(tuple(part)).flatten(0, -2) for part in parts]
    torch.testing.assert_close(
        complete(network.encode(pixels, metadata)), torch.cat(of_tokens, 1), atol=atol, rtol=1e-5
    )
    assert tokens_of(network, shapes) == [sum(span.length for span in item.spans) for item in items]

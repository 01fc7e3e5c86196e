"""Networks of tiny checkpoints, loaded or without weights, and the comparison of Qwen's towers with transformers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import engines
import torch
from references.networks import QwenOracle

from saccade import models
from saccade.engine.config import EngineConfig
from saccade.engine.executor.loader import load_model
from saccade.models.spec import MediaShape
from saccade.nn.backends.torch_sdpa import VisionAttentionBackend
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


@torch.inference_mode()
def check_qwen_tower(network: Any, folder: Path, sizes: Sequence[tuple[int, int]]) -> None:
    """Features of images of *sizes* (width, height), encoded together, equal transformers', deepstack's too."""
    oracle = QwenOracle(folder)
    items = [engines.photo(folder, size, seed) for seed, size in enumerate(sizes)]
    metadata, counts = network.prepare([MediaShape(item.grid) for item in items], VisionAttentionBackend())
    pixels = torch.frombuffer(bytearray(b"".join(item.inline or b"" for item in items)), dtype=torch.uint8)
    features = network.encode(pixels, metadata)
    doubled = torch.cat([oracle.pixel_values(item) for item in items])
    grids = torch.tensor([item.grid for item in items])
    expected = oracle.model.model.get_image_features(doubled, grids, return_dict=True)
    deep = getattr(expected, "deepstack_features", None) or ()
    parts = [torch.cat(tuple(part)) for part in (expected.pooler_output, *deep)]
    torch.testing.assert_close(features, torch.cat(parts, 1), atol=1e-4, rtol=0)
    assert counts == [item.spans[0].length for item in items]

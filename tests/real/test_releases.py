"""The config.json of releases: those of our families are read with sizes and quantisation, every other is refused."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from real.installed import CONFIGS
from tables import table

from saccade import models
from saccade.engine.executor.quantisation import Quantisation
from saccade.engine.executor.weight_formats import read_quantisation
from saccade.engine.executor.weight_index import HF_QUANT_CONFIG
from saccade.errors import StartupError

pytestmark = pytest.mark.real
OURS = re.compile(r"Qwen3-VL|Qwen3\.[56]|Kimi-K2\.|[Gg]emma-4")
TEXTS = re.compile(r"Qwen3-(?!VL)|Llama-3\.1")
BILLIONS = re.compile(r"-(\d+(?:\.\d+)?)B")
KIMI_BILLIONS = 1027
PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def config_of(name: str) -> dict[str, Any]:
    return json.loads((CONFIGS / f"{name}_config.json").read_text())


def names(pattern: re.Pattern[str] | None) -> list[str]:
    """The releases with *pattern* in their names, None for those of no family of the engine.

    One without a name if nothing is installed, for runs that leave these tests out.
    """
    files = (path.name for path in CONFIGS.glob("*_config.json") if not path.name.endswith("_hf_quant_config.json"))
    found = sorted(name.removesuffix("_config.json") for name in files)
    if pattern is None:
        return [name for name in found if not OURS.search(name) and not TEXTS.search(name)] or [""]
    return [name for name in found if pattern.search(name)] or [""]


def quantisation(name: str, folder: Path) -> Quantisation | None:
    own = CONFIGS / f"{name}_{HF_QUANT_CONFIG}"
    if own.is_file():
        shutil.copy(own, folder / HF_QUANT_CONFIG)
    return read_quantisation(config_of(name), folder)


def build(config: Mapping[str, Any]) -> Any:
    family = models.family_of(config)
    with torch.device("meta"):
        return models.load_network(family)(models.load_spec(family, config), config, {})


def check_size(name: str, network: Any, *, otherwise: float = 0.0) -> None:
    """The network has as many parameters as the name says, *otherwise* if it says nothing."""
    billions = sum(parameter.numel() for parameter in network.parameters()) / 1e9
    stated = BILLIONS.search(name)
    assert billions == pytest.approx(float(stated[1]) if stated else otherwise, rel=0.12)


def check_quantised_layers(network: Any, found: Quantisation | None) -> None:
    """What is quantised has a place in the network."""
    parameters = dict(network.named_parameters())
    for layer in found.layers if found is not None else ():
        matrix = f"{layer}.0.up_proj" if layer.endswith(".experts") else layer
        assert network.locate(f"{matrix}.weight").parameter in parameters, layer


def test_there_are_as_many_as_were_counted() -> None:
    assert (len(names(OURS)), len(names(TEXTS)), len(names(None))) == (22, 16, 51)
    assert len(list(CONFIGS.glob("*.json"))) == 117


@table("name", names(OURS))
def test_releases_with_a_tower_of_our_families(name: str, tmp_path: Path) -> None:
    network, found = build(config_of(name)), quantisation(name, tmp_path)
    check_size(name, network, otherwise=KIMI_BILLIONS)
    check_quantised_layers(network, found)
    assert network.spec.max_position_embeddings == 262_144
    assert ("NVFP4" in name) == (found is not None and "NVFP4" in found.formats)
    assert name.partition("--")[2] in PAGE.read_text()


@table("name", names(TEXTS))
def test_releases_of_texts(name: str, tmp_path: Path) -> None:
    network, found = build(config_of(name)), quantisation(name, tmp_path)
    check_size(name, network)
    check_quantised_layers(network, found)
    assert not network.spec.takes_media
    assert ("FP8" in name or "NVFP4" in name) == (found is not None)


@table("name", names(None))
def test_every_other_release_is_refused_by_its_architecture(name: str) -> None:
    """Of the families of gateways alone, the engine refuses the architecture."""
    config = config_of(name)
    with pytest.raises(StartupError, match=re.escape(config["architectures"][0])):
        models.load_spec(models.family_of(config), config)

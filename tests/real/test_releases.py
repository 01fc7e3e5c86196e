"""The config.json of releases: ours are read with sizes and quantisation, and every other is refused by name."""

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
BILLIONS = re.compile(r"-(\d+(?:\.\d+)?)B")
KIMI_BILLIONS = 1027
PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def config_of(name: str) -> dict[str, Any]:
    return json.loads((CONFIGS / f"{name}_config.json").read_text())


def names(ours: bool) -> list[str]:
    """The releases; one without a name if nothing is installed, for runs that leave these tests out."""
    files = (path.name for path in CONFIGS.glob("*_config.json") if not path.name.endswith("_hf_quant_config.json"))
    found = sorted(name.removesuffix("_config.json") for name in files)
    return [name for name in found if bool(OURS.search(name)) == ours] or [""]


def quantisation(name: str, folder: Path) -> Quantisation | None:
    own = CONFIGS / f"{name}_{HF_QUANT_CONFIG}"
    if own.is_file():
        shutil.copy(own, folder / HF_QUANT_CONFIG)
    return read_quantisation(config_of(name), folder)


def build(config: Mapping[str, Any]) -> Any:
    family = models.family_of(config)
    with torch.device("meta"):
        return models.load_network(family)(models.load_spec(family, config), config, {})


def test_there_are_as_many_as_were_counted() -> None:
    assert len(names(ours=True)) == 22
    assert len(list(CONFIGS.glob("*.json"))) == 117


@table("name", names(ours=True))
def test_releases_of_our_families(name: str, tmp_path: Path) -> None:
    """The network has as many parameters as the name says; what is quantised has a place in it."""
    network, found = build(config_of(name)), quantisation(name, tmp_path)
    billions = sum(parameter.numel() for parameter in network.parameters()) / 1e9
    stated = BILLIONS.search(name)
    assert billions == pytest.approx(float(stated[1]) if stated else KIMI_BILLIONS, rel=0.12)
    assert network.spec.max_position_embeddings == 262_144
    assert ("NVFP4" in name) == (found is not None and "NVFP4" in found.formats)
    assert name.partition("--")[2] in PAGE.read_text()
    parameters = dict(network.named_parameters())
    for layer in found.layers if found is not None else ():
        matrix = f"{layer}.0.up_proj" if layer.endswith(".experts") else layer
        assert network.locate(f"{matrix}.weight").parameter in parameters, layer


@table("name", names(ours=False))
def test_every_other_release_is_refused_by_its_architecture(name: str) -> None:
    """Of the families of gateways alone, the engine refuses the architecture."""
    config = config_of(name)
    with pytest.raises(StartupError, match=re.escape(config["architectures"][0])):
        models.load_spec(models.family_of(config), config)

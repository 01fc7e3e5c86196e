"""Spec and network of InternVL against transformers, and its two forms against one another."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
from checkpoints.internvl import COLOURS, LARGE, VISION, write_chat, write_network
from networks import build, check_features, config_of, load, with_value
from references.networks import CroppedOracle
from safetensors.torch import load_file
from tables import table

from saccade import models
from saccade.errors import InvalidValue, StartupError
from saccade.models.internvl.network import InternAttention
from saccade.models.internvl.settings import tower
from saccade.models.internvl.spec import Spec
from saccade.nn.parallel import Ranks

SIZES = [(1, 1), (56, 56), (150, 100), (300, 40), (40, 300)]
"""(width, height)"""

Folder = Callable[[str], Path]
NAMES = ["internvl", "internvl_moe"]


@pytest.fixture(scope="module")
def towers(network_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint with either tower."""
    large = write_network(tmp_path_factory.mktemp("large") / "model", "internvl", LARGE)
    return {"small": network_folder("internvl"), "large": large}


@pytest.mark.parametrize("size", ["small", "large"])
def test_features_equal_the_reference(size: str, towers: dict[str, Path]) -> None:  # A10
    check_features(CroppedOracle(towers[size]), towers[size], SIZES)


@pytest.mark.parametrize("name", [*NAMES, "large"])
def test_both_forms_are_one_network(name: str, network_folder: Folder, towers: dict[str, Path], tmp_path: Path) -> None:
    native = towers.get(name) or network_folder(name)
    chat = write_chat(tmp_path / "chat", native)
    assert models.family_of(config_of(chat)) == models.family_of(config_of(native))
    ours, theirs = load(native).state_dict(), load(chat).state_dict()
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        assert torch.equal(tensor, theirs[key]), key
    answers = []
    for folder in (native, chat):
        asked = engines.request(folder, [5, ((150, 100), 1), 9], max_tokens=6)
        answers.append(engines.drain(engines.engine(folder), asked).answers["a"].token_ids)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", NAMES)
def test_older_names_are_found_too(name: str, network_folder: Folder) -> None:
    network = build(config_of(network_folder(name)), COLOURS)
    for saved in load_file(network_folder(name) / "model.safetensors"):
        older = saved.replace("model.language_model.", "language_model.model.").replace(
            "lm_head.", "language_model.lm_head."
        )
        assert network.locate(older.removeprefix("model.")) == network.locate(saved)
        assert network.locate(saved) is not None


def test_sizes_of_the_releases() -> None:
    """InternVL3.5-8B: InternViT of 300 million parameters over Qwen3-8B."""
    text = {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40960, "rope_theta": 1000000, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    config = {
        "architectures": ["InternVLForConditionalGeneration"], "image_token_id": 151671, "text_config": text,
        "vision_config": {"attention_bias": True}, "tie_word_embeddings": False,
    }  # fmt: skip
    network = build(config, COLOURS)
    assert round(sum(one.numel() for one in network.vision_tower.parameters()) / 1e6) == 304
    assert round(sum(one.numel() for one in network.parameters()) / 1e8) == 85
    assert network.spec.item_tokens((1, 96, 128)) == 13 * 256
    vision = {
        "attention_bias": False, "use_qk_norm": True, "norm_type": "rms_norm", "hidden_size": 3200,
        "intermediate_size": 12800, "num_hidden_layers": 45, "num_attention_heads": 25,
    }  # fmt: skip
    large = build({**config, "vision_config": vision}, COLOURS)
    assert round(sum(one.numel() for one in large.vision_tower.parameters()) / 1e7) == 554


def test_a_norm_over_all_heads_is_not_cut() -> None:
    config = tower({"vision_config": {**VISION, **LARGE}})
    assert InternAttention(config, Ranks()).qkv_proj.bias is None
    with pytest.raises(StartupError, match="mm-encoder-tp-mode"):
        InternAttention(config, Ranks(1, 2))


@pytest.mark.parametrize("grid", [(1, 4, 6), (1, 0, 4), (2, 4, 8)])
def test_impossible_grids_are_refused(grid: tuple[int, int, int], network_folder: Folder) -> None:
    with pytest.raises(InvalidValue):
        Spec.read_config(config_of(network_folder("internvl"))).item_tokens(grid)


@table(
    ("path", "value", "words"),
    [
        ("text_config.model_type", "gpt_oss", "gpt_oss"),
        ("text_config.use_sliding_window", True, "use_sliding_window"),
        ("text_config.head_dim", 21, "head"),
        ("vision_config.norm_type", "batch_norm", "norm_type"),
        ("image_token_id", 10**6, "image_token_id"),
        ("text_config", 5, "text_config"),
    ],
)
def test_a_wrong_config_names_the_key(path: str, value: Any, words: str, network_folder: Folder) -> None:
    with pytest.raises(StartupError, match=words):
        Spec.read_config(with_value(config_of(network_folder("internvl")), path, value))

"""What transformers saves answers as before: the names, the orientation of experts and the config.json that it writes."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
from checkpoints import NETWORKS, TEXTS
from networks import load
from references.networks import TextOracle, image_text_model
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.conformance

WITHOUT = {"phi3_v"}
"""transformers has no class of these."""

RELEASES = [name for name in NETWORKS if name not in WITHOUT]
PROMPTS: tuple[list[Any], ...] = ([37], [5, ((96, 64), 1), 9])


def saved(folder: Path, into: Path, read: Callable[[Path], Any] = image_text_model, **settings: Any) -> Path:
    """The checkpoint, read and written by transformers; what it does not write is copied."""
    model = read(folder)
    model.to(settings.pop("dtype", torch.float32)).save_pretrained(into, **settings)
    for file in folder.iterdir():
        if not (into / file.name).exists() and not file.name.startswith("model.safetensors"):
            shutil.copy(file, into / file.name)
    return into


def answers(folder: Path, prompts: tuple[list[Any], ...] = PROMPTS) -> list[tuple[list[int], torch.Tensor]]:
    """The ids and logits of each prompt."""
    subject = engines.engine(folder)
    logits = engines.record_logits(subject)
    found = []
    for number, parts in enumerate(prompts):
        asked = engines.request(folder, parts, str(number), max_tokens=8)
        found.append((engines.drain(subject, asked).answers[str(number)].token_ids, torch.stack(logits[str(number)])))
    return found


@pytest.mark.aspect("logits")
@pytest.mark.parametrize("release", RELEASES)
def test_text_and_images_are_answered_as_before(
    release: str, network_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    original = network_folder(release)
    for before, after in zip(answers(original), answers(saved(original, tmp_path / "saved")), strict=True):
        assert after[0] == before[0]
        assert torch.equal(after[1], before[1])


@pytest.mark.parametrize("release", RELEASES)
def test_a_network_in_bfloat16_and_several_shards(
    release: str, network_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    original = network_folder(release)
    again = saved(original, tmp_path / "saved", dtype=torch.bfloat16, max_shard_size="200KB")
    assert len(list(again.glob("*.safetensors"))) > 1
    rounded = shutil.copytree(original, tmp_path / "rounded")
    tensors = load_file(rounded / "model.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, rounded / "model.safetensors")
    before, after = load(rounded).state_dict(), load(again).state_dict()
    assert before.keys() <= after.keys()
    for name, value in before.items():
        assert torch.equal(after[name], value), name


def text_model(folder: Path) -> Any:
    """transformers' model of *folder*, which reads text only."""
    return TextOracle(folder).model


@pytest.mark.parametrize("release", TEXTS)
def test_texts_are_answered_as_before(release: str, tmp_path: Path) -> None:
    original = TEXTS[release](tmp_path / "original")
    again = saved(original, tmp_path / "saved", text_model, max_shard_size="200KB")
    assert len(list(again.glob("*.safetensors"))) > 1
    ((ids, logits),), ((after_ids, after_logits),) = answers(original, PROMPTS[:1]), answers(again, PROMPTS[:1])
    assert after_ids == ids
    assert torch.equal(after_logits, logits)


@pytest.mark.parametrize("release", [name for name in TEXTS if name.startswith("qwen3_5")])
def test_a_text_may_keep_the_names_of_the_whole_model(release: str, tmp_path: Path) -> None:
    """transformers saves it so if it was read from a folder with a tower."""
    original = TEXTS[release](tmp_path / "original")
    whole = shutil.copytree(original, tmp_path / "whole")
    tensors = load_file(whole / "model.safetensors")
    renamed = {
        re.sub(r"^model\.(?!language_model\.)", "model.language_model.", name): tensors[name] for name in tensors
    }
    save_file(renamed, whole / "model.safetensors", {"format": "pt"})
    for folder in (whole, saved(whole, tmp_path / "again", text_model)):
        assert torch.equal(answers(folder, PROMPTS[:1])[0][1], answers(original, PROMPTS[:1])[0][1])

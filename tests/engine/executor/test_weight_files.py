"""Which files of a folder count, and tensors that stand in several of them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from networks import load
from safetensors.torch import load_file, save_file
from tables import table

from saccade.engine.executor.weight_files import open_checkpoint
from saccade.errors import StartupError

Tensors = dict[str, torch.Tensor]
A, B, C = (f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))
SHARED = torch.tensor([[0.5, float("nan")], [0.0, -1.0]])


def folder_of(path: Path, files: dict[str, Tensors], index: dict[str, str] | None) -> Path:
    for name, tensors in files.items():
        save_file(tensors, path / name)
    if index is not None:
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return path


def read(path: Path) -> Tensors:
    with open_checkpoint(path) as checkpoint:
        return {name: checkpoint.read(name).clone() for name in checkpoint.tensors}


def test_the_file_that_the_configuration_names_counts_alone(tmp_path: Path) -> None:
    ones, twos = {"a": torch.ones(1)}, {"a": torch.full((1,), 2.0)}
    files = {"model.safetensors": ones, "tuned.safetensors": twos, A: ones}
    folder = folder_of(tmp_path, files, {"a": A})
    (folder / "config.json").write_text('{"transformers_weights": "tuned.safetensors"}')
    assert torch.equal(read(folder)["a"], twos["a"])


def test_the_index_that_the_configuration_names_counts_alone(tmp_path: Path) -> None:
    ones, twos = {"a": torch.ones(1)}, {"a": torch.full((1,), 2.0)}
    folder = folder_of(tmp_path, {A: ones, B: twos}, {"a": A})
    (folder / "tuned.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": B}}))
    (folder / "config.json").write_text('{"transformers_weights": "tuned.safetensors.index.json"}')
    assert torch.equal(read(folder)["a"], twos["a"])


@table("name", ["gone.safetensors", "../tuned.safetensors", "pytorch_model.bin", 1])
def test_weights_that_the_configuration_names_must_be_in_the_folder(tmp_path: Path, name: object) -> None:
    folder = folder_of(tmp_path, {"model.safetensors": {"a": torch.ones(1)}}, None)
    (folder / "config.json").write_text(json.dumps({"transformers_weights": name}))
    with pytest.raises(StartupError, match=r"transformers_weights|gone\.safetensors"):
        read(folder)


@pytest.mark.ci
def test_transformers_reads_the_same_named_weights(tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    folder = shutil.copytree(tiny_qwen3_vl, tmp_path / "named")
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("layers.0.mlp.up_proj.weight"))
    save_file({**tensors, name: tensors[name] + 1}, folder / "tuned.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "transformers_weights": "tuned.safetensors"}))
    theirs = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert torch.equal(theirs[name], read(folder)[name].float())
    assert not torch.equal(theirs[name], tensors[name].float())


@table("index", [{"a": A, "b": B, "x": A}, {"a": A, "b": B, "x": B}, {"a": A, "b": B, "c": C, "x": C}, None])
def test_a_tensor_may_stand_in_several_files(tmp_path: Path, index: dict[str, str] | None) -> None:
    """With the same dtype, shape and bytes, also those of NaN."""
    files = {name: {letter: torch.ones(1), "x": SHARED.clone()} for name, letter in ((A, "a"), (B, "b"), (C, "c"))}
    values = read(folder_of(tmp_path, files, index))["x"]
    assert torch.equal(values.view(torch.uint8), SHARED.view(torch.uint8))


@table("owner", [A, C, None])
@table(
    "other",
    [SHARED + 1, SHARED.abs(), SHARED.to(torch.float16), SHARED[:1], SHARED.T.reshape(1, 4), torch.ones(2, 2).char()],
)
def test_files_that_do_not_agree_are_both_named(tmp_path: Path, owner: str | None, other: torch.Tensor) -> None:
    """Whichever of them the index names: it does not know the other."""
    ones = {name: torch.ones(1) for name in "abc"}
    files = {A: {"a": ones["a"], "x": SHARED}, B: {"b": ones["b"]}, C: {"c": ones["c"], "x": other.contiguous()}}
    folder_of(tmp_path, files, None if owner is None else {"a": A, "b": B, "c": C, "x": owner})
    with pytest.raises(StartupError, match=rf"1 tensors stand in two files .*: x in {A} and {C}\."):
        read(tmp_path)


@pytest.mark.parametrize(
    "left_out", ["mtp.safetensors", "model-00009-of-00009.safetensors", "consolidated.safetensors"]
)
def test_a_file_that_the_index_does_not_name_is_left_out(tmp_path: Path, left_out: str) -> None:
    files = {A: {"a": torch.ones(1)}, left_out: {"a": torch.zeros(1), "z": torch.ones(1)}}
    found = read(folder_of(tmp_path, files, {"a": A}))
    assert found.keys() == {"a"}
    assert found["a"] == 1


def test_without_an_index_one_file_counts_or_all_shards(tmp_path: Path) -> None:
    files = {A: {"a": torch.ones(1)}, B: {"b": torch.ones(1)}, "consolidated.safetensors": {"c": torch.ones(1)}}
    assert read(folder_of(tmp_path, files, None)).keys() == {"a", "b"}
    (tmp_path / A).unlink()
    (tmp_path / B).unlink()
    save_file({"whole": torch.ones(1)}, tmp_path / "model.safetensors")
    assert read(tmp_path).keys() == {"whole"}


@table("index", [{"a": A}, None])
def test_a_whole_file_beside_shards_is_refused(tmp_path: Path, index: dict[str, str] | None) -> None:
    """transformers reads the whole file, and vLLM the shards."""
    folder_of(tmp_path, {A: {"a": torch.ones(1)}, "model.safetensors": {"a": torch.zeros(1)}}, index)
    with pytest.raises(StartupError, match=rf"holds model\.safetensors and also {A} .*Remove model\.safetensors, or"):
        read(tmp_path)


def test_a_whole_file_with_the_index_of_absent_shards_is_refused_by_their_name(tmp_path: Path) -> None:
    """Nobody shall remove the only weights."""
    folder_of(tmp_path, {"model.safetensors": {"a": torch.zeros(1)}}, {"a": A})
    with pytest.raises(StartupError, match=rf"names {A}, which is not in .* is the whole model, remove .*index"):
        read(tmp_path)


@table("index", [{"a": "model.safetensors"}, {"a": "model.safetensors", "z": "mtp.safetensors"}, {}])
def test_an_index_may_name_the_whole_file(tmp_path: Path, index: dict[str, str]) -> None:
    files = {"model.safetensors": {"a": torch.ones(1)}, "mtp.safetensors": {"z": torch.ones(1)}}
    assert read(folder_of(tmp_path, files, index)).keys() == {"a", *index}


@table("name", ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"])
def test_an_adapter_beside_the_weights_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(StartupError, match=rf"holds {name}, an adapter .*merge_and_unload"):
        read(folder_of(tmp_path, {"model.safetensors": {"a": torch.ones(1)}}, None))


def test_a_network_from_shards_that_share_a_tensor(tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    whole = load(tiny_qwen3_vl).state_dict()
    copy = shutil.copytree(tiny_qwen3_vl, tmp_path / "model")
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    twice = "model.language_model.embed_tokens.weight"
    names = sorted(tensors)
    files = {
        A: {name: tensors[name] for name in names[::2]} | {twice: tensors[twice]},
        B: {name: tensors[name] for name in names[1::2]} | {twice: tensors[twice]},
    }
    for owner in (A, B):
        index = dict.fromkeys(names[::2], A) | dict.fromkeys(names[1::2], B) | {twice: owner}
        folder_of(copy, files, index)
        assert all(torch.equal(value, whole[name]) for name, value in load(copy).state_dict().items())

"""A rounded copy of a checkpoint: its weights are those of --quantization, to the bit, and it is whole or not there."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import NETWORKS, TEXTS
from networks import config_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from saccade.engine.config import EngineConfig
from saccade.engine.executor.loader import load_model
from saccade.engine.executor.rounding import ROUNDED
from saccade.engine.quantize import shards
from saccade.engine.quantize.copy import write_rounded_copy
from saccade.errors import StartupError
from saccade.nn import layers
from saccade.nn.experts import Experts
from saccade.nn.formats.quantised import QuantisedLinear, QuantisedWeight
from saccade.nn.layers import Linear

EVERYDAY = ("qwen3_vl", "qwen3_vl_moe", "internvl", "gemma3", "gemma4", "kimi_k25", "llava")
"""Tied heads, experts, layers that the network changes, bare matrices, latents, and layers that are stored joined."""

FAMILIES = [pytest.param(name, marks=() if name in EVERYDAY else pytest.mark.ci) for name in (*NETWORKS, *TEXTS)]


def silent(*_: object) -> None:
    """Report no progress."""


def load(folder: Path, choice: str | None = None) -> torch.nn.Module:
    config = EngineConfig(str(folder), "tiny", device="cpu", quantization=choice)  # type: ignore[arg-type]
    return load_model(config, silent).module


def tensors(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All values of a loaded network: parameters, and the fields of rounded weights by layer, format and field."""
    found = {name: value for name, value in network.named_parameters() if value.numel()}
    for name, layer in network.named_modules():
        if not isinstance(layer, Linear) or not isinstance(layer.packed, QuantisedLinear):
            assert not isinstance(layer, Experts) or not layer.quantised
            continue
        parts = [part for part in layer.packed.parts if isinstance(part, QuantisedWeight)]
        assert len(parts) == len(layer.packed.parts)
        for end in parts[0].fields:
            found[f"{name} {parts[0].format.name} {end}"] = torch.cat([part.fields[end] for part in parts])
    return found


@pytest.fixture
def every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny networks' layers are large enough to be rounded."""
    monkeypatch.setattr(layers, "LEAST_ROUNDED", 16)


@pytest.mark.usefixtures("every_layer")
@pytest.mark.parametrize("choice", ["int8", "int4"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_weights_are_those_of_the_flag(
    name: str, choice: str, network_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = network_folder(name)
    copied = write_rounded_copy(folder, tmp_path / "copy", choice, silent)
    rounded, loaded = tensors(load(folder, choice)), tensors(load(tmp_path / "copy"))
    assert rounded.keys() == loaded.keys()
    assert all(torch.equal(rounded[key], loaded[key]) for key in rounded)
    assert copied.num_bytes < copied.num_bytes_before
    kinds = {key.split(" ", 1)[1] for key in rounded if " " in key}
    assert any("weight_packed" in kind for kind in kinds) == (copied.num_rounded.get("int4", 0) > 0)


@pytest.mark.usefixtures("every_layer")
def test_small_files_with_an_index(
    network_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, one, several = network_folder("qwen3_vl"), tmp_path / "one", tmp_path / "several"
    reports: list[tuple[str, int, int]] = []
    write_rounded_copy(folder, one, "int8", lambda *report: reports.append(report))
    stage, done, total = reports[-1]
    assert (stage, done) == ("rounding weights", total)
    assert [report[1] for report in reports] == sorted(report[1] for report in reports)
    monkeypatch.setattr(shards, "SHARD_BYTES", 100_000)
    write_rounded_copy(folder, several, "int8", silent)
    files = sorted(path.name for path in several.glob("*.safetensors"))
    assert files[-1] == f"model-{len(files):05}-of-{len(files):05}.safetensors"
    assert len(files) > 2
    index = json.loads((several / "model.safetensors.index.json").read_bytes())
    stored: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(several / file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert {name for name, its in index["weight_map"].items() if its == file} == set(opened.keys())
            stored |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    whole = load_file(one / "model.safetensors")
    assert stored.keys() == whole.keys()
    assert all(torch.equal(stored[key], whole[key]) for key in whole)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())


def section(folder: Path) -> dict[str, Any]:
    return config_of(folder)["quantization_config"]  # type: ignore[no-any-return]


@pytest.mark.usefixtures("every_layer")
def test_the_configuration(network_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """The words are those of compressed-tensors, which reads them."""
    from compressed_tensors.quantization import QuantizationConfig

    folder = network_folder("qwen3_vl")
    for choice, formats in (("int8", ["int-quantized"]), ("int4", ["pack-quantized", "int-quantized"])):
        copy = tmp_path / choice
        write_rounded_copy(folder, copy, choice, silent)
        own = section(copy)
        read = QuantizationConfig.model_validate(own)
        assert [group.format for group in read.config_groups.values()] == formats
        assert own["format"] == (formats[0] if len(formats) == 1 else "mixed-precision")
        assert "model.language_model.embed_tokens" in own["ignore"]
        assert "model.visual.patch_embed.proj" in own["ignore"]
        others = {**config_of(copy)}
        del others["quantization_config"]
        assert others == config_of(folder)
    targets = section(tmp_path / "int4")["config_groups"]["group_1"]["targets"]
    assert "re:.*lm_head$" in targets
    assert "model.visual.blocks.0.attn.qkv" in targets


@pytest.mark.usefixtures("every_layer")
def test_compressed_tensors_reads_the_same_values(network_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Its decompressors give what Saccade dequantises."""
    from compressed_tensors.compressors.naive_quantized.base import NaiveQuantizationCompressor
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationConfig

    folder = network_folder("qwen3_vl")
    copied = write_rounded_copy(folder, tmp_path / "copy", "int4", silent)
    plain, stored = load_file(folder / "model.safetensors"), load_file(tmp_path / "copy" / "model.safetensors")
    schemes = QuantizationConfig.model_validate(section(tmp_path / "copy")).config_groups
    found = Counter[str]()
    for module in [name.removesuffix(".weight_scale") for name in stored if name.endswith(".weight_scale")]:
        fields = {name.removeprefix(f"{module}."): value for name, value in stored.items() if name.startswith(module)}
        kind = "int4" if "weight_packed" in fields else "int8"
        reader = PackedQuantizationCompressor if kind == "int4" else NaiveQuantizationCompressor
        scheme = schemes["group_0" if kind == "int4" else "group_1"]
        values = reader.decompress({end: value for end, value in fields.items() if end != "bias"}, scheme)["weight"]
        own = ROUNDED[kind](plain[f"{module}.weight"]).dequantised(values.dtype)
        assert torch.equal(values, own), module
        found[kind] += 1
    assert found == copied.num_rounded


@pytest.fixture
def model(network_folder: Callable[[str], Path], tmp_path: Path) -> Path:
    """A folder with files beside the weights."""
    folder = shutil.copytree(network_folder("qwen3_vl"), tmp_path / "model")
    (folder / "more").mkdir()
    (folder / "more" / "notes.txt").write_text("notes")
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("ref")
    (folder / "pytorch_model.bin").write_text("pickled")
    return folder


@pytest.mark.usefixtures("every_layer")
def test_other_files_are_copied(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "new" / "copy"
    write_rounded_copy(model, copy, "int8", silent)
    names = {str(path.relative_to(model)) for path in model.rglob("*") if path.is_file()}
    assert {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()} == names - {
        ".git/HEAD",
        "pytorch_model.bin",
    }
    assert (copy / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    assert copy.stat().st_mode & 0o777 == model.stat().st_mode & 0o777
    assert len({path.stat().st_mode for path in copy.glob("*.*")}) == 1


@pytest.mark.usefixtures("every_layer")
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_interrupted_copy_leaves_nothing(
    error: BaseException, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: str, done: int, total: int) -> None:
        if done > total // 2:
            raise error

    before = sorted(tmp_path.iterdir())
    with pytest.raises((KeyboardInterrupt, StartupError)) as raised:
        write_rounded_copy(model, tmp_path / "copy", "int8", interrupted)
    assert sorted(tmp_path.iterdir()) == before
    if isinstance(raised.value, StartupError):
        assert "could not be written, and nothing is left of it: [Errno 28] No space left" in raised.value.message


def test_what_is_refused(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "LEAST_ROUNDED", 1 << 20)
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    for target, words in (
        (model / "copy", "is in .*model itself"),
        (full, "full is not empty"),
        (full / "file", "file is a file"),
        (tmp_path / "copy", "no weight that is large enough"),
    ):
        with pytest.raises(StartupError, match=words):
            write_rounded_copy(model, target, "int8", silent)
    monkeypatch.setattr(layers, "LEAST_ROUNDED", 16)
    write_rounded_copy(model, tmp_path / "copy", "int8", silent)
    with pytest.raises(StartupError, match=r"is already quantised: config\.json: quantization_config .* int-quantized"):
        write_rounded_copy(tmp_path / "copy", tmp_path / "again", "int8", silent)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(StartupError, match=r"The copy takes 0\.0 GB, but 0\.0 GB are free"):
        write_rounded_copy(model, tmp_path / "large", "int8", silent)
    assert not (tmp_path / "again").exists()
    assert not (tmp_path / "large").exists()


@pytest.mark.usefixtures("every_layer")
def test_a_tied_head(model: Path, tmp_path: Path) -> None:
    """A stored head that equals the embedding is replaced; a head that alone is stored is refused."""
    config = config_of(model)
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True
    (model / "config.json").write_text(json.dumps(config))
    stored = load_file(model / "model.safetensors")
    embedding = "model.language_model.embed_tokens.weight"
    save_file({**stored, "lm_head.weight": stored[embedding].clone()}, model / "model.safetensors")
    write_rounded_copy(model, tmp_path / "copy", "int8", silent)
    copied = load_file(tmp_path / "copy" / "model.safetensors")
    assert copied["lm_head.weight"].dtype == torch.int8
    assert torch.equal(copied[embedding], stored[embedding])
    copied_config = config_of(tmp_path / "copy")
    assert copied_config["tie_word_embeddings"] is copied_config["text_config"]["tie_word_embeddings"] is False
    head = {"lm_head.weight": stored.pop(embedding)}
    save_file({**stored, **head}, model / "model.safetensors")
    with pytest.raises(StartupError, match="a head that is also the embedding, but no embedding"):
        write_rounded_copy(model, tmp_path / "other", "int8", silent)

"""`saccade models` and `saccade pull`: what is in the hub's cache."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hub import running_hub

from saccade.cli.main import run
from saccade.engine.quantize.copy import write_rounded_copy


def put(source: Path, cache: Path, name: str, *files: str) -> None:
    """Put a model into the hub's cache as its client would; of *files* only, if there are any."""
    snapshot = cache / f"models--{name.replace('/', '--')}" / "snapshots" / ("a" * 40)
    shutil.copytree(source, snapshot)
    for path in snapshot.iterdir():
        if files and path.name not in files:
            path.unlink()


def test_list_of_an_empty_cache_names_the_supported_architectures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "none"))
    assert run(["models"]) == 0
    shown = capsys.readouterr().out
    assert "`saccade pull ID` fetches one" in shown
    assert re.search("qwen3_vl +Qwen3VLForConditionalGeneration", shown)


def test_list_has_family_disk_and_memory(
    tiny_qwen3_vl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put(tiny_qwen3_vl, tmp_path, "acme/tiny")
    put(tiny_qwen3_vl, tmp_path, "acme/config-only", "config.json")
    write_rounded_copy(tiny_qwen3_vl, tmp_path / "copy", "int8", lambda *_: None)
    put(tmp_path / "copy", tmp_path, "acme/small")
    put(tiny_qwen3_vl, tmp_path, "acme/weights-only", "model.safetensors")
    put(tiny_qwen3_vl, tmp_path, "other/bert", "config.json")
    (tmp_path / "models--other--bert" / "snapshots" / ("a" * 40) / "config.json").write_text('{"model_type": "bert"}')
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert run(["models"]) == 0
    _, header, config_only, small, tiny, bert, *_ = capsys.readouterr().out.splitlines()
    assert header.split() == ["model", "family", "disk", "weights", "in", "memory"]
    assert config_only.split()[:2] == ["acme/config-only", "qwen3_vl"]
    assert config_only.endswith("its files are not complete, or the engine refuses them")
    assert small.endswith("as on disk: compressed-tensors int-quantized, 8 bits")
    weights = (tiny_qwen3_vl / "model.safetensors").stat().st_size
    name, family, disk, disk_unit, memory, memory_unit, _, dtype = tiny.split()
    assert (name, family, disk_unit, memory_unit, dtype) == ("acme/tiny", "qwen3_vl", "MiB", "MiB", "float32")
    assert float(disk) >= float(memory)
    assert float(memory) == pytest.approx(weights / 2**20, rel=0.02)
    assert bert.split()[:3] == ["other/bert", "not", "supported"]


@pytest.mark.ci
def test_model_is_pulled_without_pickles_and_then_listed(tmp_path: Path) -> None:
    def saccade(*words: str) -> str:
        command = [sys.executable, "-m", "saccade.cli.main", *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    with running_hub() as endpoint:
        environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        assert "acme/good is in " in saccade("pull", "acme/good")
        assert "does not identify one family" in saccade("pull", "acme/eye")
    files = {path.name for path in tmp_path.rglob("snapshots/*/*")}
    assert files == {"chat_template.jinja", "config.json", "model.safetensors"}
    assert [path.parts[-4] for path in tmp_path.rglob("*.safetensors")] == ["models--acme--good"]
    assert "acme/good  llava" in saccade("models")
    environment["HF_ENDPOINT"] = "http://127.0.0.1:9"
    assert "saccade: The model acme/none could not be fetched: http://127.0.0.1:9 could not be reached" in saccade(
        "pull", "acme/none"
    )

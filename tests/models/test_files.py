"""A checkpoint's small files. # A5"""

from pathlib import Path

import pytest

from saccade import models
from saccade.errors import StartupError
from saccade.models.files import architecture, parse_json, read_model_files
from saccade.protocol.description import ModelFiles


def test_reads_what_a_gateway_needs_and_no_weights(tiny_qwen3_vl: Path) -> None:
    found = read_model_files(tiny_qwen3_vl)
    assert {"config.json", "tokenizer.json", "preprocessor_config.json"} <= set(found.files)
    assert "model.safetensors" not in found.files
    assert models.find(architecture(parse_json(found, "config.json"))) == "qwen3_vl"


def test_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"config\.json"):
        read_model_files(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_malformed_file_is_named(content: bytes) -> None:
    with pytest.raises(StartupError, match=r"preprocessor_config\.json"):
        parse_json(ModelFiles(files={"preprocessor_config.json": content}), "preprocessor_config.json")


@pytest.mark.parametrize("config", [{}, {"architectures": []}, {"architectures": ["A", "B"]}, {"architectures": "A"}])
def test_exactly_one_architecture(config: dict[str, object]) -> None:
    with pytest.raises(StartupError, match="architectures"):
        architecture(config)


def test_unknown_architecture_lists_the_known() -> None:
    with pytest.raises(StartupError, match="Qwen3VLForConditionalGeneration"):
        models.find("Qwen3VLForConditionalGeneration2")

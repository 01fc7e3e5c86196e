"""`saccade serve` refuses what could never answer, before anything is started."""

import shutil
from pathlib import Path

import pytest

from saccade.cli.main import run


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("chat_template.json", "no chat template"),
        ("tokenizer.json", "no tokenizer.json"),
        ("config.json", "config.json"),
        ("preprocessor_config.json", "no preprocessor_config.json"),
    ],
)
def test_incomplete_folder_is_named(
    tiny_qwen3_vl: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], missing: str, words: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_qwen3_vl, folder, ignore=shutil.ignore_patterns(missing))
    assert run(["serve", str(folder)]) == 1
    assert words in capsys.readouterr().err

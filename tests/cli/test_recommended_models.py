"""Which models a machine can begin with."""

import re
from pathlib import Path

import pytest
from tables import table

from saccade.cli.main import run
from saccade.cli.recommended_models import Machine, multiplies_bfloat16, recommend

GIB = 1 << 30
CPU, GPU = (False, 4), (True, 2)


@table(
    ("memory", "processor", "names"),
    [
        (2, CPU, {}),
        (8, CPU, {"chat": "SmolVLM-256M-Instruct", "documents": "GLM-OCR"}),
        (64, CPU, dict.fromkeys(("chat", "boxes", "video"), "Qwen3-VL-2B-Instruct") | {"documents": "GLM-OCR"}),
        (24, GPU, dict.fromkeys(("chat", "boxes", "video"), "Qwen3-VL-8B-Instruct") | {"documents": "chandra"}),
        (80, GPU, dict.fromkeys(("chat", "boxes", "video"), "Qwen3-VL-32B-Instruct") | {"documents": "chandra"}),
    ],
)
def test_the_largest_that_fits_is_named(memory: int, processor: tuple[bool, int], names: dict[str, str]) -> None:
    found = {
        purpose: release.name.partition("/")[2] for purpose, release in recommend(Machine(memory * GIB, *processor))
    }
    assert found == names


def test_processor_says_whether_it_has_bfloat16(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("flags : fpu avx512_bf16 amx_tile\n")
    assert multiplies_bfloat16(tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text("flags : fpu avx512f\n")
    assert not multiplies_bfloat16(tmp_path / "cpuinfo")
    assert not multiplies_bfloat16(tmp_path / "none")


def test_command_prints_a_line_to_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "none"))
    monkeypatch.setattr("saccade.cli.models.has_gpu", lambda: False)
    assert run(["models", "--purpose", "documents", "--memory", "16Gi"]) == 0
    shown = capsys.readouterr().out
    assert "To begin with, for 16 GiB of memory without a GPU:" in shown
    assert re.search(r"documents +[\d.]+ GiB +saccade serve zai-org/GLM-OCR\n", shown)
    assert "chat " not in shown.partition("Supported:")[0]
    assert run(["models", "--memory", "1Gi"]) == 0
    assert "none: the smallest takes more memory" in capsys.readouterr().out

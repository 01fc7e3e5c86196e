"""Command lines of `vllm serve`, as recipes and notes of others have them, with `saccade serve` in front. # F15

vllm_lines.txt has a name and a line in each row; M stands for the model.
"""

import shlex
from pathlib import Path

import pytest
from tables import table

from saccade.cli.main import run

LINES = dict(row.split("|", 1) for row in Path(__file__).with_name("vllm_lines.txt").read_text().splitlines())
REFUSED = {
    "R24": "glm47",
    "R31": "fp8_e5m2",
    "R32": "Saccade runs no third-party code",
    "R36": "Saccade generates answers",
    "R37": "never with those of an adapter",
}
"""What the error of a line says, if a flag or its value cannot be served."""


def outcome(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code of a line for a model that is not there, and what it prints."""
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    stand_ins = {"M": "/nowhere", "examples/tool_chat_template_gemma4.jinja": str(template)}
    code = run(["serve", *(stand_ins.get(word, word) for word in shlex.split(LINES[name]))])
    return code, capsys.readouterr().err


@table("name", LINES.keys() - REFUSED)
def test_a_line_of_vllm_comes_as_far_as_the_model(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = outcome(name, tmp_path, capsys)
    assert (code, said.splitlines()[-1]) == (1, "saccade: There is no folder /nowhere.")


@table("name", REFUSED)
def test_a_refused_line_of_vllm_says_why(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = outcome(name, tmp_path, capsys)
    assert code == 2
    assert REFUSED[name] in said
    assert "Unknown option" not in said

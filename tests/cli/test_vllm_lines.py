"""Command lines of `vllm serve`, with `saccade serve` in front, for a model that is not there. # F15"""

from pathlib import Path

import pytest
from tables import table
from vllm_lines import LINES, REFUSED, TEMPLATE

from saccade.cli.main import run

pytestmark = pytest.mark.ci


def outcome(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code of a line, and what it prints."""
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    code = run(["serve", *LINES[name].with_stand_ins({"M": "/nowhere", TEMPLATE: str(template)})])
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
    assert code in (1, 2)
    assert REFUSED[name] in " ".join(said.split())
    assert "Unknown option" not in said

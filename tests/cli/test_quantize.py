"""`saccade quantize`: what it prints, and an error for each folder that it cannot read or write."""

import re
from pathlib import Path

import pytest

from saccade.cli.bundled import bundled
from saccade.cli.main import run


def test_a_copy_of_the_bundled_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "copy"
    assert run(["quantize", str(bundled("model")), str(out), "--format", "int4"]) == 0
    shown = capsys.readouterr()
    assert shown.err == "rounding weights\n"
    words = (
        rf"{re.escape(str(out))} has \d+ weights in int4 and \d+ weights in int8: [\d.]+ MiB instead of [\d.]+ MiB\."
    )
    assert re.match(words, shown.out)
    assert shown.out.endswith(f"Serve it: `saccade serve {out}`.\n")
    assert run(["quantize", str(bundled("model")), str(out)]) == 1
    assert "copy is not empty" in capsys.readouterr().err.replace("\n", " ")


def test_a_model_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["quantize", str(tmp_path / "none"), str(tmp_path / "copy")]) == 1
    assert f"There is no folder {tmp_path / 'none'}." in capsys.readouterr().err
    assert not (tmp_path / "copy").exists()

"""`saccade demo` where its server does not start."""

import sys
from pathlib import Path

import pytest

from saccade.cli.demo import serving
from saccade.errors import StartupError


def server_that_ends(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every program that Python starts end with *code*."""
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\nexit {code}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


@pytest.mark.parametrize("code", [1, 2])
def test_server_that_explained_its_exit_gives_its_exit_code(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server_that_ends(code, tmp_path, monkeypatch)
    with pytest.raises(SystemExit) as end, serving():
        pass
    assert end.value.code == code


def test_server_that_ended_silently_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server_that_ends(3, tmp_path, monkeypatch)
    with pytest.raises(StartupError, match="ended with exit code 3"), serving():
        pass

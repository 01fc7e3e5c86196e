"""No bar and no colour goes into a pipe, whatever the environment says of colours."""

import io
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

import saccade
from saccade.cli.main import run
from saccade.cli.screen import StartProgress
from saccade.consoles import new_console
from saccade.protocol.engine_ipc import EngineProgress


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_a_bar_needs_a_terminal(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "stderr", stream)
    assert Console(stderr=True).is_terminal  # Rich's own answer
    with StartProgress(new_console(stderr=True)) as progress:
        progress.show(EngineProgress("loading weights", 1, 3))
    assert ("\x1b[" in stream.getvalue()) is stream.isatty()
    assert "loading weights" in stream.getvalue()


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
@pytest.mark.parametrize(
    "words", [["--help"], ["serve", "--help"], ["doctor"], ["doctor", "--nope"], ["replay", "none"]]
)
def test_colours_need_a_terminal(words: list[str], stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    stream.truncate(0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    run(words)
    assert stream.getvalue().strip()
    assert stream.isatty() or "\x1b[" not in stream.getvalue()


def test_one_place_decides_about_colours() -> None:
    root = Path(saccade.__file__).parent
    makers = [path.name for path in root.rglob("*.py") if re.search(r"(?<!new_)\bConsole\(", path.read_text())]
    assert makers == ["consoles.py"]


class ZMQInteractiveShell:
    """The name by which Rich knows a notebook."""


def test_a_notebook_gets_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())  # as ipykernel's stream says
    assert new_console(stderr=True).is_terminal
    monkeypatch.setattr("builtins.get_ipython", ZMQInteractiveShell, raising=False)
    assert not new_console(stderr=True).is_terminal

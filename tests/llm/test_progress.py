"""No bar is drawn into a pipe, whatever the environment says of colours."""

import io
import sys

import pytest
from rich.console import Console

from saccade.cli.screen import StartProgress
from saccade.llm.progress import progress_console
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
    with StartProgress(progress_console()) as progress:
        progress.show(EngineProgress("loading weights", 1, 3))
    assert ("\x1b[" in stream.getvalue()) is stream.isatty()
    assert "loading weights" in stream.getvalue()


class ZMQInteractiveShell:
    """The name by which Rich knows a notebook."""


def test_a_notebook_gets_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())  # as ipykernel's stream says
    assert progress_console().is_terminal
    monkeypatch.setattr("builtins.get_ipython", ZMQInteractiveShell, raising=False)
    assert not progress_console().is_terminal

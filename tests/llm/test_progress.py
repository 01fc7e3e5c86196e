"""The bar of a batch: on a terminal, in a notebook, and nowhere else. `make clients` has it in a real notebook."""

import contextlib
import io
import sys
import types
from typing import Any

import pytest

from saccade.llm import progress
from saccade.llm.progress import answers_bar


class Output:
    """An output of a notebook's cell; *shown* has everything that it displayed."""

    def __init__(self) -> None:
        self.shown: list[dict[str, str]] = []

    def display(self, data: dict[str, str], raw: bool, display_id: bool) -> "Output":
        assert (raw, display_id) == (True, True)
        self.shown.append(data)
        return self

    def update(self, data: dict[str, str], raw: bool) -> None:
        assert raw
        self.shown.append(data)


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Output:
    """A notebook's output, which stands in for IPython's, since that is not installed with Saccade."""
    output = Output()
    module: Any = types.ModuleType("IPython.display")
    module.display = output.display
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setattr(progress, "is_in_notebook", lambda: True)
    return output


def test_notebook_has_one_output_that_ends_with_the_count(notebook: Output) -> None:
    with answers_bar(300) as advance:
        for _ in range(299):
            advance()
    assert notebook.shown[0]["text/plain"] == "0 of 300 answers"
    assert notebook.shown[-1]["text/plain"] == "299 of 300 answers"
    assert '<progress max="300" value="299">' in notebook.shown[-1]["text/html"]
    assert len(notebook.shown) < 300


def test_notebook_shows_how_far_a_failed_batch_came(notebook: Output) -> None:
    with contextlib.suppress(RuntimeError), answers_bar(2) as advance:
        advance()
        raise RuntimeError
    assert notebook.shown[-1]["text/plain"] == "1 of 2 answers"


def test_pipe_gets_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    with answers_bar(2) as advance:
        advance()
    assert stream.getvalue() == ""

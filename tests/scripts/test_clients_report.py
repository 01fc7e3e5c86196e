"""The runner of `make clients`: whatever a client does, the run ends with rows."""

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.ci


ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/clients"
NEEDS_NOTHING = "# /// script\n# dependencies = []\n# ///\n"


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of the runner by its name."""
    monkeypatch.syspath_prepend(str(SCRIPT))
    return importlib.import_module


def run(runner: Any, folder: Path, text: str) -> list[Any]:
    """Run a program of *text*, in an environment that has been made before."""
    environment = folder / "cache/client"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin/python").symlink_to(sys.executable)
    (environment / "installed").write_text("")
    path = folder / "client.py"
    path.write_text(NEEDS_NOTHING + text)
    program = runner("environments").read_program(path)
    return list(runner("running").run(program, folder / "cache", {"PYTHONPATH": str(SCRIPT)}))


TRIES = """
from results import expect, tell

def wrong() -> None:
    expect(1, 2, 3)

print("what a client says of itself")
tell("A client", "pip", {"a chat": lambda: None, "a tool": wrong})
"""


def test_every_attempt_is_a_row(tmp_path: Path, runner: Any) -> None:
    rows = run(runner, tmp_path, TRIES)
    assert [(row.client, row.what, row.ok) for row in rows] == [
        ("A client", "a chat", True),
        ("A client", "a tool", False),
    ]
    assert rows[1].detail == "ValueError: expected 2 or 3, got 1"
    assert rows[0].version


@pytest.mark.parametrize(
    ("text", "detail"),
    [("", "exit code 0"), ("import no_such_client", "exit code 1"), (TRIES + "exit(3)", "exit code 3")],
)
def test_a_program_that_says_nothing_or_fails_is_a_row(tmp_path: Path, text: str, detail: str, runner: Any) -> None:
    *_, last = run(runner, tmp_path, text)
    assert (last.client, last.what, last.ok, last.detail) == ("client", "the program", False, detail)


def test_a_program_that_does_not_end_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: Any) -> None:
    monkeypatch.setattr(runner("running"), "PROGRAM_SECONDS", 0.5)
    (row,) = run(runner, tmp_path, "import time\ntime.sleep(600)")
    assert (row.what, row.ok, row.detail) == ("the program", False, "no end within 0.5 s")


def test_failed_installation_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: Any) -> None:
    path = tmp_path / "client.mjs"
    path.write_text("""// /// script\n// dependencies = ["openai@1"]\n// ///\n""")
    program = runner("environments").read_program(path)
    assert program.dependencies == ("openai@1",)
    monkeypatch.setenv("PATH", str(tmp_path))  # has no npm
    (row,) = runner("running").run(program, tmp_path / "cache", {})
    assert (row.client, row.what, row.ok) == ("client", "installation", False)


def test_a_program_of_node_finds_what_it_imports(tmp_path: Path, runner: Any) -> None:
    """Node looks for modules next to the program, so both are copied into its environment."""
    path = tmp_path / "client.mjs"
    path.write_text("// /// script\n// dependencies = []\n// ///\n")
    folder = tmp_path / "cache/client"
    folder.mkdir(parents=True)
    (folder / "installed").write_text("")
    program = runner("environments").read_program(path)
    assert runner("environments").command(program, tmp_path / "cache") == ["node", str(folder / "client.mjs")]
    for other in runner("environments").programs():
        for name in re.findall(r'from "\./(.+)"', other.path.read_text()) if other.is_node else ():
            assert (folder / name).read_text() == (SCRIPT / name).read_text()


def test_a_program_says_what_it_needs(tmp_path: Path, runner: Any) -> None:
    path = tmp_path / "client.py"
    path.write_text("import openai\n")
    with pytest.raises(ValueError, match="has no block"):
        runner("environments").read_program(path)


def test_a_failure_is_shown_with_its_reason(runner: Any) -> None:
    result = runner("results").Result
    text = runner("table").page([result("A", "1", "a chat", True), result("B", "2", "a tool", False, "x | y")])
    assert "| A | 1 | a chat | works |\n| B | 2 | a tool | fails: x \\| y |\n" in text


def test_page_is_of_the_clients_that_are_pinned(runner: Any) -> None:
    """A change of a version needs a run of `make clients`, and every row works."""
    lines = (ROOT / "docs/clients.md").read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")][1:]
    assert {row[-1] for row in rows} == {"works"}
    first = [(program.alone or program.dependencies)[0] for program in runner("environments").programs()]
    assert {row[1] for row in rows} == {one.replace("==", "@").rpartition("@")[2] for one in first}


def test_a_result_is_a_line_of_json(runner: Any, capsys: pytest.CaptureFixture[str]) -> None:
    runner("results").tell("A client", "pytest", {"a chat": lambda: None})
    told = json.loads(capsys.readouterr().out)
    assert told == {"client": "A client", "version": pytest.__version__, "what": "a chat", "ok": True, "detail": ""}

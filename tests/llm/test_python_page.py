"""The examples of docs/python.md run in order, as in a notebook, and print what the page shows."""

import fnmatch
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ci

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
EXAMPLE = re.compile(r"```python\n(.*?)```(?:\n```text\n(.*?)```)?", re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, like a checkout, with the images that the page's commands put there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").symlink_to(PAGE.parents[1] / "src")
    commands = re.findall(r"^    (.*)$", PAGE.read_text().partition("```python")[0], re.MULTILINE)
    subprocess.run(["bash", "-c", "\n".join(commands)], check=True)
    assert len(list((tmp_path / "photos").iterdir())) == 3
    return tmp_path


def test_examples_print_what_the_page_shows(folder: Path) -> None:
    *examples, (tests, _) = EXAMPLE.findall(PAGE.read_text())
    assert len(examples) == 5
    program = "\nprint(chr(0), end='')\n".join(code for code, _ in examples)
    for printed, (_, shown) in zip(output("-c", program).split("\0"), examples, strict=True):
        pattern = re.sub(r"([\[\]?*])", r"[\1]", shown).replace("...", "*")
        assert fnmatch.fnmatchcase(printed, pattern), printed
    (folder / "test_server.py").write_text(tests)
    assert "1 passed" in output("-m", "pytest", "-p", "no:cacheprovider", "test_server.py")


def output(*arguments: str) -> str:
    """What Python prints for *arguments*."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout

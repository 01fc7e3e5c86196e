"""The examples of docs/python.md run in order, as in a notebook, and print what the page shows."""

import fnmatch
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from saccade.cli.bundled import bundled

pytestmark = pytest.mark.ci

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
EXAMPLE = re.compile(r"```python\n(.*?)```(?:\n```text\n(.*?)```)?", re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with two images and a damaged one."""
    monkeypatch.chdir(tmp_path)
    photos = tmp_path / "photos"
    photos.mkdir()
    for name in ("5RIU-green", "8K-brown"):
        shutil.copy(bundled("images") / "texts" / f"{name}.png", photos)
    (photos / "damaged.png").write_bytes(b"no image")
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

"""What the README promises a newcomer, run: its code, the examples, `saccade demo`. # F8"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from server import Server, serving

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "src/saccade/cli/bundled/pictures"
TEXTS = sorted(PICTURES.glob("texts/*.png"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def reader() -> Iterator[Server]:
    """`saccade serve` without a model: the bundled one."""
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def demo() -> str:
    """What `saccade demo` prints."""
    return run("-m", "saccade.cli.main", "demo")


def run(*command: str, folder: Path = ROOT, url: str = "") -> str:
    environment = {**os.environ, "COLUMNS": "120"} | ({"SACCADE_URL": url} if url else {})
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def expected(picture: Path) -> tuple[str, str]:
    """What a bundled picture shows and its colour, as its file name says: texts/K7Q-red.png."""
    shown, colour = picture.stem.split("-")
    return shown, colour


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_example(reader: Server, example: Path) -> None:
    text, colour = expected(TEXTS[0])
    output = run(str(example), url=f"{reader.url}/v1")
    assert text in output or colour in output


def test_readme_code(reader: Server, tmp_path: Path) -> None:
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    picture = TEXTS[0]
    (tmp_path / "picture.png").write_bytes(picture.read_bytes())
    assert len(code) == 1
    output = run("-c", code[0].replace("http://127.0.0.1:8000", reader.url), folder=tmp_path)
    assert output.strip() == expected(picture)[0]


@pytest.mark.parametrize(
    ("kind", "questions"),
    [
        ("texts", ("What does it say?", "What colour is the text?")),
        ("shapes", ("What shape is it?", "What colour is the shape?")),
    ],
)
def test_demo_answers_about_every_bundled_picture(demo: str, kind: str, questions: tuple[str, str]) -> None:
    pictures = sorted(PICTURES.glob(f"{kind}/*.png"))
    assert pictures
    for picture in pictures:
        for question, answer in zip(questions, expected(picture), strict=True):
            assert f"{question} {answer} " in demo.partition(picture.name)[2].partition(".png")[0]

"""Every example of docs/api works as it is written, and answers as the page says."""

import fnmatch
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from server import Server, serving

from saccade.errors import SaccadeError

pytestmark = pytest.mark.ci

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "api"
PAGES = sorted(FOLDER.glob("*.md"))
EXAMPLE = re.compile(r"```(bash|python)\n(.*?)```(?:\n\n```(json|text)\n(.*?)```)?", re.DOTALL)
ADDRESS = "http://127.0.0.1:8000"


class Example(NamedTuple):
    """A program in *language* with the answer that the page has after it, which *form* says how to compare."""

    language: str
    code: str
    form: str
    answer: str


def examples(page: Path) -> list[Example]:
    return [Example(*parts) for parts in EXAMPLE.findall(page.read_text())]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving("--state", str(tmp_path_factory.mktemp("state"))) as server:
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with image.png, as the first page makes it."""
    folder = tmp_path_factory.mktemp("pages")
    (example,) = examples(FOLDER / "index.md")
    output(example, folder, ADDRESS)
    return folder


def output(example: Example, folder: Path, url: str) -> str:
    code = example.code.replace(ADDRESS, url)
    command = ["bash", "-c", code] if example.language == "bash" else [sys.executable, "-c", code]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def fits(shown: str, text: str) -> bool:
    """Whether *text* is what the page shows, in which `...` stands for anything."""
    pattern = re.sub(r"([\[\]?*])", r"[\1]", shown).replace("...", "*")
    return fnmatch.fnmatchcase(text, pattern)


def differences(shown: Any, actual: Any, place: str = "answer") -> list[str]:
    """What the page shows and the answer does not have. Numbers need only be numbers, and lists may go on."""
    match shown, actual:
        case dict(), dict():
            return [
                line
                for name, value in shown.items()
                for line in (
                    differences(value, actual[name], f"{place}.{name}")
                    if name in actual
                    else [f"{place} has no {name}"]
                )
            ]
        case list(), list():
            if len(shown) > len(actual):
                return [f"{place} has {len(actual)} items"]
            pairs = enumerate(zip(shown, actual, strict=False))
            return [line for i, (one, other) in pairs for line in differences(one, other, f"{place}[{i}]")]
        case str(), str():
            return [] if fits(shown, actual) else [f"{place} is {actual!r}"]
        case ((int() | float()), (int() | float())) if bool not in (type(shown), type(actual)):
            return []
    return [] if shown == actual else [f"{place} is {actual!r}"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_answer_as_the_page_shows(server: Server, folder: Path, page: Path) -> None:
    for example in examples(page):
        text = output(example, folder, server.url)
        if example.form == "json":
            assert differences(json.loads(example.answer), json.loads(text)) == [], example.code
        else:
            assert fits(example.answer.strip(), text.replace("\r", "").strip()), text


def test_every_page_has_two_examples_with_their_answers() -> None:
    counts = {page.name: sum(bool(example.form) for example in examples(page)) for page in PAGES}
    assert counts.pop("index.md") == 0
    assert {name for name, count in counts.items() if count < 2} == set()


def leaves(kind: type[SaccadeError]) -> Iterator[type[SaccadeError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from leaves(child)


def test_the_page_lists_every_code_with_its_status() -> None:
    rows = re.findall(r"^\| (\d+) \| (.*?) \|", (FOLDER / "errors.md").read_text(), re.MULTILINE)
    listed = {(int(status), code) for status, codes in rows for code in re.findall(r"`(\w+)`", codes)}
    never_shown = {"server_error", "invalid_request", "startup_error", "peer_failed"}
    assert listed == {(kind.status, kind.code) for kind in leaves(SaccadeError) if kind.code not in never_shown}


def test_a_difference_is_found() -> None:
    shown = {"id": "a-...", "items": [{"count": 1, "text": "x"}]}
    assert differences(shown, {"id": "a-1", "items": [{"count": 2, "text": "x"}, {}], "more": 1}) == []
    assert differences(shown, {"id": "b-1", "items": [{"count": "2", "text": "y"}]}) == [
        "answer.id is 'b-1'",
        "answer.items[0].count is '2'",
        "answer.items[0].text is 'y'",
    ]

"""A release stops with a plain sentence while something that only the owner knows is blank."""

import tomllib
from pathlib import Path

import pytest
import release_ready
from release_ready import BLANKS, faults_of
from tables import table

pytestmark = pytest.mark.ci

ROOT = Path(__file__).parents[2]
OWNER: dict[str, object] = {
    "repository": "https://host.example/saccade",
    "tags": "https://host.example/saccade/tags",
    "contact": "faults@host.example",
    "pypi_project": "saccade-vlm",
}
URLS = {"Repository": "https://host.example/saccade", "Releases": "https://host.example/saccade/tags"}
PROJECT: dict[str, object] = {"name": "saccade-vlm", "version": "1.2.0", "urls": URLS}


def test_a_release_without_blanks_is_ready() -> None:
    assert list(faults_of(OWNER, PROJECT, "v1.2.0")) == []


@table("name", BLANKS)
@table("value", ["", "  ", None])
def test_each_blank_stops_a_release(name: str, value: str | None) -> None:
    owner = {key: text for key, text in OWNER.items() if key != name} | ({} if value is None else {name: value})
    (fault,) = faults_of(owner, PROJECT, "v1.2.0")
    assert fault == f"Fill in release/owner.toml, whose comments say what each line is for: {name}."


@table(
    "change, tag, words",
    [
        (
            {"urls": {}},
            "v1.2.0",
            'Write [project.urls] into pyproject.toml, as release/owner.toml says: Repository = "',
        ),
        (
            {"name": "saccade"},
            "v1.2.0",
            "Give pypi_project in release/owner.toml the name in pyproject.toml, saccade, ",
        ),
        ({}, "v1.2.1", "Tag the release v1.2.0, the version in pyproject.toml, not v1.2.1."),
    ],
)
def test_what_disagrees_with_pyproject_stops_a_release(change: dict[str, object], tag: str, words: str) -> None:
    (fault,) = faults_of(OWNER, PROJECT | change, tag)
    assert fault.startswith(words)


def test_the_file_of_blanks_says_what_each_is_for() -> None:
    text = (ROOT / "release" / "owner.toml").read_text()
    assert tuple(tomllib.loads(text)) == BLANKS
    assert all("  # " in line for line in text.splitlines() if not line.startswith("#"))


def test_the_script_says_what_stops_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "release").mkdir()
    (tmp_path / "release" / "owner.toml").write_text('repository = ""\n')
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "saccade-vlm"\nversion = "1.2.0"\n')
    assert release_ready.main(["v1.2.0"], tmp_path) == 1
    assert capsys.readouterr().out.endswith("is for: repository, tags, contact, pypi_project.\n")

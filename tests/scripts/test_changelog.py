"""CHANGELOG.md is made of the fragments, and says what the version is."""

import re
import tomllib
from pathlib import Path

import changelog
import pytest
from changelog import released

pytestmark = pytest.mark.ci


ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
INTRODUCTION = "# Changelog\n\nNewest first.\n\n"
FIRST = "## 1.0.0 (2026-01-01)\n\n### Added\n\n- Chats.\n"


def test_fragments_become_a_dated_section_and_are_deleted(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.1.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(INTRODUCTION + FIRST)
    (tmp_path / "changelog.d").mkdir()
    (tmp_path / "changelog.d" / "a.md").write_text("Chats take\nimages.\n")
    (tmp_path / "changelog.d" / "b.md").write_text("An image no longer fails.\n")
    changelog.main(tmp_path)
    text = (tmp_path / "CHANGELOG.md").read_text()
    assert list((tmp_path / "changelog.d").iterdir()) == []
    section = r"## 1\.1\.0 \(\d{4}-\d\d-\d\d\)\n\n### Added\n\n- Chats take images\.\n\n### Fixed\n\n- An image no longer fails\.\n\n"
    assert re.fullmatch(re.escape(INTRODUCTION) + section + re.escape(FIRST), text)


def test_a_release_that_has_a_section_gets_further_sentences() -> None:
    text = released(INTRODUCTION + FIRST + "\n### Commands\n\n- `ask`.\n", "1.0.0", "2026-01-02", ["Videos."])
    assert text == INTRODUCTION + (
        "## 1.0.0 (2026-01-02)\n\n### Added\n\n- Chats.\n- Videos.\n\n### Commands\n\n- `ask`.\n"
    )


def test_the_project_s_changelog_is_as_the_script_writes_it() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    newest = re.search(r"^## (\S+) \((\S+)\)$", text, re.MULTILINE)
    assert newest is not None
    assert newest[1] == VERSION
    assert released(text, VERSION, newest[2], []) == text


def test_images_of_deploy_have_the_version() -> None:
    pages = [ROOT / "docs" / name for name in ("deploy.md", "layouts.md")]
    files = [path for path in (ROOT / "deploy").rglob("*") if path.is_file()]
    tags = {tag for path in (*pages, *files) for tag in re.findall(r"\bsaccade:(\d[\d.]*\d)", path.read_text())}
    assert tags == {VERSION}

"""pyproject.toml and constraints.txt agree, and what Saccade depends on too closely has an upper bound."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tables import table

from saccade.engine.installed import PACKAGES

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIREMENTS = [
    Requirement(line)
    for line in (
        *PROJECT["dependencies"],
        *EXTRAS["cpu"],
        *EXTRAS["engine"],
        *EXTRAS["eval"],
        *EXTRAS["fonts"],
        *EXTRAS["ray"],
        *EXTRAS["tracing"],
        *EXTRAS["docs"],
        *EXTRAS["browser"],
        *EXTRAS["dev"],
    )
]
REQUIREMENTS = [requirement for requirement in REQUIREMENTS if requirement.name != PROJECT["name"]]
PINNED = {
    canonicalize_name(name): version
    for name, _, version in (
        line.partition("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")
    )
}
PLACES = {
    "uvicorn": ("gateway/server/connection.py", "uvicorn.protocols.http.httptools_impl"),  # not its public interface
    "numba": ("nn/amx/kernel.py", "numba.extending"),  # the compiler's inside
    "msgspec": ("gateway/json_body.py", "Expected `"),  # the text of its errors
    "cykooz-resizer": ("media/resize.py", "bit for bit"),  # pixels
    "pillow": ("media/resample.py", "Pillow 13"),  # pixels, bit for bit
    "fontpkg-arimo": ("media/pdf_fonts.py", "Arimo[wght].ttf"),  # the names of files
    "pylopdf-fonts-ar": ("media/pdf_fonts.py", "NotoSansArabic-Variable.ttf"),
    "pylopdf-fonts-jp": ("media/pdf_fonts.py", "NotoSansJP-Regular.otf"),
    "pylopdf-fonts-ko": ("media/pdf_fonts.py", "NotoSansKR-Regular.otf"),
    "pylopdf-fonts-zh-cn": ("media/pdf_fonts.py", "NotoSansSC-Regular.otf"),
    "pylopdf-fonts-zh-tw": ("media/pdf_fonts.py", "NotoSansTC-Regular.otf"),
}
"""What has an upper bound, and the file and the words that are the reason."""


@table("requirement", REQUIREMENTS)
def test_pinned_version_satisfies_the_requirement(requirement: Requirement) -> None:
    assert requirement.specifier.contains(PINNED[canonicalize_name(requirement.name)])


@pytest.mark.parametrize("name", PLACES)
def test_close_dependency_has_an_upper_bound(name: str) -> None:
    file, words = PLACES[name]
    assert words in (ROOT / "src" / "saccade" / file).read_text()
    (requirement,) = (one for one in REQUIREMENTS if canonicalize_name(one.name) == name)
    assert any(bound.operator in ("<", "<=", "==", "~=") for bound in requirement.specifier)


def test_readme_names_the_pinned_torch() -> None:
    """Another version in the first command of a row would be replaced by the second, with CUDA libraries."""
    readme = (ROOT / "README.md").read_text()
    installs = re.findall(r"`pip install [^`]*\btorch\b[^`]*`", readme)
    assert len(installs) == 2
    assert all(command.endswith(f"torch=={PINNED['torch']}`") for command in installs), installs
    assert f"pinned to {PINNED['torch']}" in readme


def test_the_base_has_nothing_of_the_engine() -> None:  # F26
    names = [Requirement(line).name for line in EXTRAS["engine"]]
    assert sorted(names) == sorted(PACKAGES)
    assert not {*names, "numba"} & {Requirement(line).name for line in PROJECT["dependencies"]}

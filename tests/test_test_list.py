"""docs/test-list.md and docs/requirements.md are whole.

Every fault has a test that exists and names it, or a reason; every requirement that a test names is explained.
"""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest
from tables import table

pytestmark = pytest.mark.guard

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "test-list.md"
NUMBERS = {*range(1, 20), *range(21, 33), 35, 39, 42, 45}
ROWS = {
    int(number): proof for number, proof in re.findall(r"^\| (\d+) \| .+? \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
}
NO_TEST = "Cannot occur: "


def test_every_number_is_there() -> None:
    assert set(ROWS) >= NUMBERS


def numbers_in(text: str) -> set[int]:
    """The numbers that a comment or docstring names, as in `[eng] 4, 24`."""
    return {int(number) for group in re.findall(r"\[eng\] (\d+(?:, \d+)*)", text) for number in group.split(", ")}


@table("number", sorted(ROWS))
def test_listed_tests_exist_and_name_their_number(number: int) -> None:
    tests = re.findall(r"`([\w/]+\.py)::(\w+)`", ROWS[number])
    assert tests or ROWS[number].startswith(NO_TEST)
    for path, name in tests:
        source = (TESTS / path).read_text()
        tree = ast.parse(source)
        found = [node for node in tree.body if getattr(node, "name", None) == name]
        assert len(found) == 1, (path, name)
        named = numbers_in(ast.get_source_segment(source, found[0]) or "") | numbers_in(ast.get_docstring(tree) or "")
        assert number in named, (path, name, "does not name", number)


def requirements_in(source: str) -> set[str]:
    """The requirements that comments and docstrings name, as in `# A4, E1`."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    texts = [token.string for token in tokens if token.type == tokenize.COMMENT or token.string.startswith('"""')]
    return set(re.findall(r"\b[A-F]\d{1,2}\b", " ".join(texts)))


def test_every_requirement_that_a_test_names_is_explained() -> None:
    page = (PAGE.parent / "requirements.md").read_text()
    named = {name for path in TESTS.rglob("*.py") for name in requirements_in(path.read_text())}
    assert named == set(re.findall(r"^\| ([A-F]\d{1,2}) \|", page, re.MULTILINE))

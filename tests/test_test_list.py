"""docs/test-list.md is whole: every number has a test that exists and names it, or a reason."""

import ast
import re
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("number", sorted(ROWS))
def test_its_tests_exist_and_name_it(number: int) -> None:
    tests = re.findall(r"`([\w/]+\.py)::(\w+)`", ROWS[number])
    assert tests or ROWS[number].startswith(NO_TEST)
    for path, name in tests:
        source = (TESTS / path).read_text()
        tree = ast.parse(source)
        found = [node for node in tree.body if getattr(node, "name", None) == name]
        assert len(found) == 1, (path, name)
        named = numbers_in(ast.get_source_segment(source, found[0]) or "") | numbers_in(ast.get_docstring(tree) or "")
        assert number in named, (path, name, "does not name", number)

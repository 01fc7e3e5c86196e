"""Words and constructions that the project's English avoids: their counts only go down.

`PYTHONPATH=tests/support/suite python tests/test_english.py` prints today's counts. A commit that removes some lowers the
ceilings of its rows.
"""

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from tables import table

import saccade

pytestmark = pytest.mark.guard

SOURCE = Path(saccade.__file__).parent
PROJECT = Path(__file__).parents[1]
MAX_WORDS = 25
PARTICIPLES = frozenset(
    {
        "asked",
        "found",
        "given",
        "held",
        "kept",
        "lent",
        "made",
        "said",
        "sent",
        "shown",
        "taken",
        "told",
        "wanted",
        "written",
    }
)


@cache
def _modules() -> Mapping[Path, str]:
    return {path: path.read_text() for path in SOURCE.rglob("*.py") if not path.name.endswith("_pb2.py")}


@cache
def _pages() -> Mapping[Path, str]:
    paths = [PROJECT / "README.md", PROJECT / "CONTRIBUTING.md", *(PROJECT / "docs").rglob("*.md")]
    return {path: path.read_text() for path in paths}


def _matches(pattern: str) -> Callable[[Path, str], int]:
    """Counts a pattern in a text of one line, whose whitespace is single spaces."""
    compiled = re.compile(pattern, re.IGNORECASE)
    return lambda _, text: len(compiled.findall(" ".join(text.split())))


def _bound_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name


def _participles(_: Path, text: str) -> int:
    """Counts bindings of names such as `held` or `_asked`; `is_held` is a predicate and may stay."""
    return sum(name.strip("_").lower() in PARTICIPLES for name in _bound_names(ast.parse(text)))


def _sentences(text: str) -> Iterator[str]:
    """Yields the sentences of a Markdown page's paragraphs, list items and table cells."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"^(    .*|#.*|\|[-|: ]+\|)$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`\n]*`", "code", text)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    for block in re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) |\|", text):
        yield from re.split(r"(?<=[.!?])\s+", " ".join(block.split()))


def _long_sentences(path: Path, text: str) -> int:
    """Counts sentences above MAX_WORDS; decisions record what was thought and stay as they are."""
    return 0 if path.parent.name == "decisions" else sum(len(s.split()) > MAX_WORDS for s in _sentences(text))


class Row(NamedTuple):
    """What is counted, in which texts, and the most that may be found."""

    what: str
    texts: Callable[[], Mapping[Path, str]]
    count_in: Callable[[Path, str], int]
    ceiling: int


WHERE = r'(?:[.,;:(|]|"""|#) where\b|(?<![.`])\bwhere (?:there|it|they|no|none|every|each|nothing|neither|both) '
TURNS = (
    r"\bof (?:which there|whom)\b|\bis (?:not )?said to|\bcomes true\b|\bgo(?:es)? without saying\b|\bas \w+ has it\b"
    r"|\b(?:says?|said|tells?|told) of\b|\bso many\b|\bhave \*\w+\* \w+ed\b"
)
BEHIND = r"(?<!left )\bbehind\b|\bbeside\b"
PASSIVE = r"\bwhat (?:is|are|was|were) (?:not )?\w+(?:ed|en|d)\b"

ROWS = [
    Row("'where' for if or when, src", _modules, _matches(WHERE), 7),
    Row("'where' for if or when, docs", _pages, _matches(WHERE), 7),
    Row("turns that English does not use, src", _modules, _matches(TURNS), 0),
    Row("turns that English does not use, docs", _pages, _matches(TURNS), 0),
    Row("'what is' with a participle, src", _modules, _matches(PASSIVE), 1),
    Row("'what is' with a participle, docs", _pages, _matches(PASSIVE), 1),
    Row("'picture' for image, src", _modules, _matches(r"\bpictures?\b"), 2),
    Row("'picture' for image, docs", _pages, _matches(r"\bpictures?\b"), 0),
    Row("'behind' for after and 'beside' for next to or and, src", _modules, _matches(BEHIND), 2),
    Row("'behind' for after and 'beside' for next to or and, docs", _pages, _matches(BEHIND), 3),
    Row("names that are participles", _modules, _participles, 16),
    Row(f"sentences of more than {MAX_WORDS} words, docs", _pages, _long_sentences, 0),
]


def _counts(row: Row) -> Counter[str]:
    counts = {str(path.relative_to(PROJECT)): row.count_in(path, text) for path, text in row.texts().items()}
    return Counter({path: count for path, count in counts.items() if count})


@table("row", ROWS)
def test_avoided_english_only_goes_down(row: Row) -> None:
    counts = _counts(row)
    assert counts.total() <= row.ceiling, f"{counts.total()} {row.what}, most in {counts.most_common(5)}"


if __name__ == "__main__":
    for row in ROWS:
        counts = _counts(row)
        print(f"{counts.total():5} (ceiling {row.ceiling}) {row.what}: {counts.most_common(3)}")

"""Marks of JSON are counted exactly, wherever they stand."""

import json
import random
from typing import Any

import pytest
from tables import table

from saccade import json_counts
from saccade.json_counts import STRETCH_BYTES, num_brackets, num_commas, num_items, num_marks, num_strings

NO_END = 1 << 40


@table("share", [0.0, 0.0001, 0.01, 1.0])
def test_marks_are_counted_in_any_stretch(share: float) -> None:
    draw = random.Random(7)
    for length in (0, 1, STRETCH_BYTES - 1, STRETCH_BYTES, STRETCH_BYTES + 1, 5 * STRETCH_BYTES + 3):
        text = bytes(44 if draw.random() < share else 97 for _ in range(length))
        assert num_marks(text, b",", NO_END) == text.count(b",")


@table("array, num", [("[]", 0), ("[ \n]", 0), ("[7]", 1), ("[ 7, 8 ]", 2)])
def test_items_are_counted(array: str, num: int) -> None:
    assert num_items(array.encode()) == num


def a_value(draw: random.Random, depth: int) -> Any:
    """A value whose texts are full of what is counted."""
    match draw.randrange(4) if depth else 3:
        case 0:
            return [a_value(draw, depth - 1) for _ in range(draw.randrange(4))]
        case 1:
            return {f'{number},[{{"\\': a_value(draw, depth - 1) for number in range(draw.randrange(4))}
        case 2:
            return draw.randrange(1000)
    return "".join(draw.choices('[{,"\\a', k=draw.randrange(12)))


def counted(value: Any) -> tuple[int, int, int]:
    """Return the strings, brackets and commas of *value* in JSON."""
    match value:
        case str():
            return 1, 0, 0
        case list():
            parts, own = [counted(each) for each in value], 0
        case dict():
            parts, own = [counted(each) for each in value.values()], len(value)
        case _:
            return 0, 0, 0
    strings, brackets, commas = (sum(numbers) for numbers in zip(*parts, strict=True)) if parts else (0, 0, 0)
    return strings + own, brackets + 1, commas + max(0, len(value) - 1)


@table("stretch", [1, 2, 3, 7, 1 << 18])
def test_counts_are_those_of_the_values(stretch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_counts, "LONG_STRETCH_BYTES", stretch)
    draw = random.Random(stretch)
    for _ in range(200):
        value = a_value(draw, 4)
        text = json.dumps(value).encode()
        assert (num_strings(text, NO_END), num_brackets(text, NO_END), num_commas(text, NO_END)) == counted(value)


def test_counting_ends_soon_after_the_bound() -> None:
    """A body of 12 MiB of them took 60 ms each."""
    most, long = 1000, json_counts.LONG_STRETCH_BYTES
    for count, item in ((num_strings, b'"",'), (num_brackets, b"{},"), (num_commas, b"0,")):
        assert most < count(item * long, most) <= long
    assert most < num_marks(b"," * long, b",", most) <= most + STRETCH_BYTES

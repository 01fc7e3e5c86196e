"""What of a body is counted before it is decoded."""

import json
import random

import pytest
from tables import table

from saccade.errors import BodyTooLarge, InvalidValue
from saccade.gateway import body_bounds
from saccade.gateway.body_bounds import (
    MAX_BRACKETS,
    MAX_BYTES_BESIDE_IMAGES,
    MAX_DATA_URLS,
    MAX_STRINGS,
    check_bounds,
    check_messages,
)
from saccade.gateway.chat import CalledFunction, ChatMessage, ToolCall
from saccade.json_counts import num_items

URL = '"data:image/png;base64,'
LARGE = MAX_BYTES_BESIDE_IMAGES + 1


def test_image_bytes_are_not_counted() -> None:
    check_bounds(f'{{"a": [{URL}{"A" * LARGE}"], "b": {URL}{"A" * LARGE}", "c": "{"x" * 1000}"}}'.encode())
    check_bounds(("{" + f'"a": {URL}' + "AAA\\/" * (LARGE // 32) + "A" * LARGE + '"}').encode())  # as PHP writes it
    check_bounds(b'{"text": "\xc3\xa9", "url": ' + URL.encode() + b"A" * LARGE + b'"}')


@table(
    "body",
    [
        b'{"a": "' + b"x" * LARGE + b'"}',
        b'{"a": [' + b"[]," * (LARGE // 3) + b"[]]}",
        b'{"a": "\\"data:' + b'b", "' * (LARGE // 5) + b'"}',
        b'{"data:": 0, "b": [' + b"0," * (LARGE // 2) + b"0]}",
        b'{"a": "data:' + b"\\u0041" * (LARGE // 6 + 1) + b'"}',
        b'{"a": "data:' + b"A" * LARGE + "\U0001f600".encode() + b'"}',
        b'"data:"' * (LARGE // 7 + 1),
        (b'"data:' + b"A" * 14_000 + b'",') * (MAX_DATA_URLS + 1000),
    ],
    ids=["text", "arrays", "texts", "numbers", "escapes", "wide characters", "empty URLs", "many URLs"],
)
def test_other_bytes_are_counted(body: bytes) -> None:
    with pytest.raises(BodyTooLarge):
        check_bounds(body)


@table("text", ["", "\\", '"', '\\"', "a\\\\", "data:", '"data:'])
def test_strings_are_counted_whatever_is_in_them(text: str) -> None:
    """An escaped quote ends no string; one behind an escaped backslash does."""
    allowed = json.dumps([text] * MAX_STRINGS).encode()
    check_bounds(allowed)
    with pytest.raises(InvalidValue, match=f"more than {MAX_STRINGS}"):
        check_bounds(json.dumps([text] * (MAX_STRINGS + 1)).encode())


def test_a_text_full_of_quotes_is_one_string() -> None:
    check_bounds(json.dumps({"content": json.dumps({str(key): key for key in range(2 * MAX_STRINGS)})}).encode())


def test_strings_are_counted_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared with a decoder, on strings of quotes, backslashes and what looks like URLs."""
    draw = random.Random(3)
    for _ in range(300):
        strings = [
            "".join(draw.choices(['"', "\\", "data:", "a", "\n", "\u00e9"], k=draw.randint(0, 6))) for _ in range(9)
        ]
        body = json.dumps(strings, ensure_ascii=draw.random() < 0.5).encode()
        monkeypatch.setattr(body_bounds, "MAX_STRINGS", 9)
        check_bounds(body)
        monkeypatch.setattr(body_bounds, "MAX_STRINGS", 8)
        with pytest.raises(InvalidValue):
            check_bounds(body)


@table("text", ["", '"', "\\", "[{", '"[{\\'])
@table("kind", ["[]", "{}", "[[]]", '{"a": {}}'])
def test_arrays_and_objects_are_counted_outside_of_strings(
    kind: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_bounds, "MAX_BRACKETS", 9)
    number = 8 // (kind.count("[") + kind.count("{"))
    string = json.dumps(text * 20)
    check_bounds(f"[{string}, {f'{kind}, {string},' * number} {string}]".encode())
    with pytest.raises(InvalidValue, match="more than 9 arrays and objects"):
        check_bounds(f"[{string}, {f'{kind}, {string},' * (number + 1)} {string}]".encode())


def test_values_in_the_arguments_of_calls_are_counted_together() -> None:
    """They are JSON in strings, so the brackets of the body do not have them."""

    def turn(arguments: str) -> ChatMessage:
        return ChatMessage(role="assistant", tool_calls=[ToolCall("a", CalledFunction("f", arguments))])

    half = json.dumps({"a": [[]] * (MAX_BRACKETS // 2 - 2), "b": '[\\"' * MAX_BRACKETS})
    check_messages([turn(half), turn(half)])
    with pytest.raises(InvalidValue, match=f"more than {MAX_BRACKETS} arrays and objects together"):
        check_messages([turn(half), turn(half), turn("{}")])


def test_numbers_are_counted_without_building_them() -> None:
    assert [num_items(array) for array in (b"[1]", b"[1, 2]", b"[1,\n2 , 3]")] == [1, 2, 3]

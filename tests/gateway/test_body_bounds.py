"""What of a body is counted before it is decoded."""

import json
import random
from typing import Any

import pytest
from tables import table

from saccade.errors import BodyTooLarge, InvalidValue, RequestError
from saccade.gateway import body_bounds
from saccade.gateway.body_bounds import (
    MAX_BRACKETS,
    MAX_BYTES_BESIDE_IMAGES,
    MAX_DATA_URLS,
    MAX_STRINGS,
    MOST_COMMAS,
    check_bounds,
    check_messages,
)
from saccade.gateway.chat_request import CalledFunction, ChatMessage, ToolCall
from saccade.json_counts import num_items

URL = '"data:image/png;base64,'
LARGE = MAX_BYTES_BESIDE_IMAGES + 1


def test_image_bytes_are_not_counted() -> None:
    check_bounds(f'{{"a": [{URL}{"A" * LARGE}"], "b": {URL}{"A" * LARGE}", "c": "{"x" * 1000}"}}'.encode())
    check_bounds(("{" + f'"a": {URL}' + "AAA\\/" * (LARGE // 32) + "A" * LARGE + '"}').encode())  # as PHP writes it
    check_bounds(b'{"text": "\xc3\xa9", "url": ' + URL.encode() + b"A" * LARGE + b'"}')


@table(
    ("body", "error"),
    [
        (b'{"a": "' + b"x" * LARGE + b'"}', BodyTooLarge),
        (b'{"a": "data:' + b"\\u0041" * (LARGE // 6 + 1) + b'"}', BodyTooLarge),
        (b'{"a": "data:' + b"A" * LARGE + "\U0001f600".encode() + b'"}', BodyTooLarge),
        ((b'"data:' + b"A" * 14_000 + b'",') * (MAX_DATA_URLS + 1000), BodyTooLarge),
        # Their values are counted before their bytes: the count ends soon.
        (b'{"a": [' + b"[]," * (LARGE // 3) + b"[]]}", InvalidValue),
        (b'{"a": "\\"data:' + b'b", "' * (LARGE // 5) + b'"}', InvalidValue),
        (b'{"data:": 0, "b": [' + b"0," * (LARGE // 2) + b"0]}", InvalidValue),
        (b'"data:"' * (LARGE // 7 + 1), InvalidValue),
    ],
    ids=["text", "escapes", "wide characters", "many URLs", "arrays", "texts", "numbers", "empty URLs"],
)
def test_other_bytes_are_counted(body: bytes, error: type[RequestError]) -> None:
    with pytest.raises(error):
        check_bounds(body)


class Counted(bytes):
    """A body that notes how many of its bytes are counted or copied."""

    num_bytes = 0

    def count(self, *arguments: Any) -> int:
        self.num_bytes += len(range(*slice(*arguments[1:]).indices(len(self))))
        return super().count(*arguments)

    def __getitem__(self, place: Any) -> Any:
        self.num_bytes += len(range(*place.indices(len(self))))
        return super().__getitem__(place)


@table(
    ("item", "most"),
    [(b"[],", MAX_BRACKETS), (b"{},", MAX_BRACKETS), (b'"",', MAX_STRINGS), (b"0,", MOST_COMMAS)],
)
def test_a_body_of_too_many_values_is_looked_at_as_far_as_its_bound(item: bytes, most: int) -> None:
    """The rest of 12 MiB would hold the event loop for 30 ms."""
    body = Counted(b'{"a": [' + item * ((MAX_BYTES_BESIDE_IMAGES - 20) // len(item)) + b"0]}")
    with pytest.raises(InvalidValue):
        check_bounds(body)
    # Once roughly and once exactly, by pieces.
    assert body.num_bytes < 2 * most * len(item) + (1 << 19)


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

"""What errors say about bodies that are no JSON, and about values of a wrong type or size."""

import json
from typing import Any

import pytest
from tables import table

from saccade.errors import InvalidValue
from saccade.gateway.apis.chat.reader import parse_chat

IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a", "detail": "secret"}}]}]


def complaint(body: bytes) -> str:
    with pytest.raises(InvalidValue) as caught:
        parse_chat(body)
    return caught.value.message


@table(
    ("body", "ending"),
    [
        (b" \n", "The body is empty; send a JSON object."),
        (b'{\n  "a": 1,\n}', ": line 3, column 1: remove the comma before it."),
        (b"{'a': 1}", ": line 1, column 2: names and strings stand in double quotes."),
        ("{\"\u00e9\": 'b'}".encode(), ": line 1, column 7: names and strings stand in double quotes."),
        (b"{a: 1}", ": line 1, column 2: names stand in double quotes."),
        (b'{"a": True}', ": line 1, column 7: write true, false or null, in small letters."),
        (b'{"a": 1 "b": 2}', ": line 1, column 9: a comma is missing, or a quote before it."),
        (b'{"a" 1}', ": line 1, column 6: a colon is missing after a name."),
        (b'{"a": "x\ny"}', r": line 1, column 9: write a line break in a string as \n."),
        (b'{"a": "C:\\x"}', ": line 1, column 11: write a backslash in a string as two."),
        (b'// a\n{"a": 1}', ": line 1, column 1: JSON has no comments."),
        (b'{"a": 1} x', ": line 1, column 11: remove what follows the end of the object."),
        (b'{"a": 01}', ": line 1, column 8."),
        (b"model=a", ": line 1, column 1: send a JSON object, not a form."),
        (b'{"a": "b', ": a string or bracket is not closed."),
        (b'{"model": "\xff"}', ": its text is not valid UTF-8."),
        (b'{"model": "\xed\xa0\xbd"}', ": its text is not valid UTF-8."),
        (b"[]", "The body must be an object, not an array."),
    ],
)
def test_bodies_that_are_no_json(body: bytes, ending: str) -> None:
    assert complaint(body) == ("The body is not valid JSON" + ending if ending.startswith(":") else ending)


HALF = "is half of a surrogate pair; write both halves, or leave it out."


@table(
    ("text", "column", "half"),
    [
        (r'"\ud83d"', 8, r"\ud83d"),
        (r'"hi \uD83D"', 11, r"\uD83D"),
        (r'"\ud83d and more text"', 8, r"\ud83d"),
        (r'"\ud83d\u0041"', 8, r"\ud83d"),
        (r'"\ud83d\n and more text"', 8, r"\ud83d"),
        (r'"\ud83d\""', 8, r"\ud83d"),
        (r'"\ud83d\\"', 8, r"\ud83d"),
        (r'"\ud83d\ud83d\ude00"', 8, r"\ud83d"),
        (r'"\ude00"', 8, r"\ude00"),
        (r'"\ude00 and more text"', 8, r"\ude00"),
        (r'"\ud83d\ude00\ude00"', 20, r"\ude00"),
        (r'"\\\ud83d"', 10, r"\ud83d"),
        (r'["\ud83d", 1]', 9, r"\ud83d"),
        (r'{"\ud83d": 1}', 9, r"\ud83d"),
        (r'{"type": "text", "text": "\ud83d"}', 33, r"\ud83d"),
    ],
)
@table("after", ["", ', "b": "and more text"'])
def test_half_of_a_surrogate_pair_is_named(text: str, column: int, half: str, after: str) -> None:
    body = f'{{"a": {text}{after}}}'.encode()
    assert complaint(body) == f"The body is not valid JSON: line 1, column {column}: {half} {HALF}"


@table(
    "body",
    [rb'{"a": "x\ud83', rb'{"a": "x\ud83d', rb'{"a": "x\ud83d\ud', rb'{"a": "x\\ud83d"', rb'{"a": "\ud83d\ude00'],
)
def test_cut_body_is_not_called_half_of_a_pair(body: bytes) -> None:
    assert complaint(body) == "The body is not valid JSON: a string or bracket is not closed."


@table("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
@table("text", ['{"a": 1}', ' {"model": "\u00e4"}'])
def test_other_encodings_are_named(encoding: str, text: str) -> None:
    name = encoding[:6].upper()
    assert complaint(text.encode(encoding)) == f"The body is not valid JSON: its text is {name}; send it as UTF-8."
    if encoding.endswith("e"):  # without a mark
        marked = ("\ufeff" + text).encode(encoding)
        assert complaint(marked) == f"The body is not valid JSON: its text is {name}; send it as UTF-8."


@table(
    ("fields", "sentence"),
    [
        ({"max_tokens": -1}, "`max_tokens` must be a whole number, at least 1, not -1."),
        ({"max_tokens": 1.5}, "`max_tokens` must be a whole number, not 1.5."),
        ({"seed": "7"}, "`seed` must be a whole number, not a string."),
        ({"seed": 10**30}, "`seed` must be a whole number, at most 9223372036854775807."),
        ({"temperature": 2.5}, "`temperature` must be a number, at most 2, not 2.5."),
        ({"top_p": -0.5}, "`top_p` must be a number, at least 0, not -0.5."),
        ({"stream": 1}, "`stream` must be true or false, not 1."),
        ({"stream_options": {"include_usage": 1}}, "`stream_options.include_usage` must be true or false, not a number."),
        ({"stop": 1}, "`stop` must be a string or an array, not 1."),
        ({"stop": [""]}, "`stop[0]` must be a string with at least 1 character."),
        ({"stop": ["a"] * 99}, "`stop` must be an array with at most 16 items."),
        ({"messages": []}, "`messages` must be an array with at least 1 item."),
        ({"messages": "hi"}, "`messages` must be an array, not a string."),
        ({"messages": [{"content": "hi"}]}, "`messages[0].role` is missing."),
        ({"logit_bias": {"secret": 500}}, "A value in `logit_bias` must be a number, at most 100."),
        ({"messages": IMAGE}, "`messages[0].content[0].image_url.detail` has a value that is not accepted."),
    ],
)  # fmt: skip
def test_values_of_a_wrong_type_or_size(fields: dict[str, Any], sentence: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    assert complaint(json.dumps(body).encode()) == sentence

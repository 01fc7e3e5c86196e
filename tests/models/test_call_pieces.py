"""Calls in the exact form of their grammars, in pieces: their concatenation is the whole arguments, byte for byte. F13"""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any, Final

from tables import table

from saccade.models.tool_formats import FORMATS
from saccade.models.tool_formats.call_pieces import Mark
from saccade.models.tool_formats.json_pieces import JsonValue, complete_object

Lexeme = tuple[Mark | None, str]
"""A tag within a call, or text."""

PROPERTIES: Final = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "list": {"type": "array"},
    "more": {"type": ["object", "null"]},
    "any": {"anyOf": [{"type": "string"}, {"type": "number"}]},
}
FUNCTIONS: Final = {"look": {"name": "look", "parameters": {"type": "object", "properties": PROPERTIES}}}
TEXTS: Final = (
    "a b", "", "\n", "é你😀", '"quoted" \\ {x} [y]', "</parameter>", "\n</parameter", "</arg_value>", "3", "null",
    "\t\x01/", "a:b,c", "\\u0041", "<parameter=count>\n4\n</parameter> x", "x\n</function>\n",
)  # fmt: skip
SCALARS: Final = (0, -7, 2**70, 1.5, 1e30, True, False, None)
SEPARATOR: Final[Lexeme] = ("separator", "")


def arguments(draw: random.Random) -> dict[str, Any]:
    """Arguments, of which each may be missing."""

    def inner(depth: int) -> Any:
        match draw.randrange(4 if depth < 3 else 2):
            case 0:
                return draw.choice(TEXTS)
            case 1:
                return draw.choice(SCALARS)
            case 2:
                return [inner(depth + 1) for _ in range(draw.randrange(4))]
        return {draw.choice(("a", "b_2", "c")): inner(depth + 1) for _ in range(draw.randrange(3))}

    values = {
        "text": draw.choice(TEXTS),
        "count": draw.randrange(-99, 99),
        "list": [inner(0) for _ in range(draw.randrange(4))],
        "more": draw.choice([None, {"k": inner(0)}]),
        "any": draw.choice([*TEXTS, 4, 2.5]),
    }
    return {key: value for key, value in values.items() if draw.random() < 0.7}


def dumps(value: Any, draw: random.Random) -> str:
    """JSON as models write it: with any white space, escaped or not."""
    text = json.dumps(value, ensure_ascii=draw.random() < 0.5, indent=draw.choice([None, None, 1]))
    return text.replace("/", "\\/") if draw.random() < 0.5 else text


def bare(key: str, value: Any, draw: random.Random) -> str:
    """A value without quotes if it can only be a text."""
    return str(value) if key == "text" else dumps(value, draw)


def hermes(args: dict[str, Any], draw: random.Random) -> Iterator[Lexeme]:
    yield None, f'\n{{"name": "look", "arguments": {dumps(args, draw)}}}\n'


def kimi_k2(args: dict[str, Any], draw: random.Random) -> Iterator[Lexeme]:
    yield from ((None, "functions.look:0"), SEPARATOR, (None, dumps(args, draw)))


def qwen3_coder(args: dict[str, Any], draw: random.Random) -> Iterator[Lexeme]:
    values = (f"<parameter={key}>\n{bare(key, value, draw)}\n</parameter>\n" for key, value in args.items())
    yield None, f"\n<function=look>\n{''.join(values)}</function>\n"


def glm45(args: dict[str, Any], draw: random.Random) -> Iterator[Lexeme]:
    yield None, "look\n"
    for key, value in args.items():
        yield from (("key_begin", ""), (None, key), ("key_end", ""), (None, "\n"))
        yield from (("value_begin", ""), (None, bare(key, value, draw)), ("value_end", ""), (None, "\n"))


def kimi_k3(args: dict[str, Any], draw: random.Random) -> Iterator[Lexeme]:
    yield from ((None, 'call tool="look" index="1"'), SEPARATOR)
    if draw.random() < 0.2:
        yield from (SEPARATOR, (None, "json"), SEPARATOR, (None, dumps(args, draw)), SEPARATOR)
        return
    names = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}
    for key, value in args.items():
        kind = names.get(type(value), "null")
        yield from (SEPARATOR, (None, f'argument key="{key}" type="{kind}"'), SEPARATOR)
        yield from ((None, value if isinstance(value, str) else dumps(value, draw)), SEPARATOR)


def gemma4(args: dict[str, Any], draw: random.Random) -> Iterator[Lexeme]:
    def written(value: Any) -> Iterator[Lexeme]:
        match value:
            case str():
                yield from (SEPARATOR, (None, value), SEPARATOR)
            case list() | dict():
                opening, closing = "[]" if isinstance(value, list) else "{}"
                keys = [""] * len(value) if isinstance(value, list) else [f"{key}:" for key in value]
                yield None, opening
                inner = value if isinstance(value, list) else value.values()
                for number, (key, one) in enumerate(zip(keys, inner, strict=True)):
                    yield None, ("," if number else "") + key
                    yield from written(one)
                yield None, closing
            case _:
                yield None, json.dumps(value)

    yield None, "call:look"
    yield from written(args)


WRITERS: Final[dict[str, Callable[[dict[str, Any], random.Random], Iterator[Lexeme]]]] = {
    "hermes": hermes, "kimi_k2": kimi_k2, "qwen3_coder": qwen3_coder, "glm45": glm45, "kimi_k3": kimi_k3,
    "gemma4": gemma4,
}  # fmt: skip


def cut(lexemes: Iterator[Lexeme], size: int) -> Iterator[Lexeme]:
    """Texts in pieces of *size* characters."""
    for mark, text in lexemes:
        if mark is not None or not text:
            yield mark, text
        yield from ((None, text[start : start + size]) for start in range(0, len(text), size) if mark is None)


def test_every_form_is_in_the_table() -> None:
    assert WRITERS.keys() == FORMATS.keys()


@table("name", WRITERS)
def test_the_pieces_of_a_call_are_its_arguments(name: str) -> None:
    draw = random.Random(name)
    for _ in range(60):
        given = arguments(draw)
        if name != "gemma4" and "any" in given and name != "kimi_k3" and draw.random() < 0.5:
            del given["any"]
        lexemes = list(WRITERS[name](given, draw))
        wanted = json.dumps(given, ensure_ascii=False)
        for size in (1, 2, 3, 7, 10**6):
            call = FORMATS[name].pieces(FUNCTIONS)
            seen = ""
            for mark, text in cut(iter(lexemes), size):
                seen += call.text(text) if mark is None else call.mark(mark)
                assert wanted.startswith(seen)
            seen += call.finish_arguments()
            assert (call.name, seen, call.is_broken) == ("look", wanted, False)
            assert call.id == ("functions.look:0" if name == "kimi_k2" else None)


@table(
    "name, lexemes",
    [
        ("hermes", [(None, '\n{"name": "book", "arguments": {}}\n')]),
        ("hermes", [(None, '\n{"arguments": {}, "name": "look"}\n'), (None, " " * 300)]),
        ("hermes", [(None, '\n{"name": "look", "arguments": {"a": tru}}\n')]),
        ("hermes", [(None, '\n{"name": "look", "arguments": {"a": "\\ud800 and more"}}\n')]),
        ("hermes", [SEPARATOR]),
        ("kimi_k2", [(None, "functions.book:0"), SEPARATOR]),
        ("kimi_k2", [SEPARATOR]),
        ("kimi_k2", [(None, "functions.look:0"), SEPARATOR, (None, "{}"), SEPARATOR]),
        ("qwen3_coder", [(None, "\n<function=book>\n")]),
        ("qwen3_coder", [(None, "\n<function=look>\n</function>\nand")]),
        ("qwen3_coder", [(None, "\n<function=look>\n"), (None, "x" * 300)]),
        ("glm45", [(None, "book\n"), ("key_begin", "")]),
        ("glm45", [(None, "look\n"), ("value_begin", "")]),
        ("glm45", [(None, "look\n"), ("key_begin", ""), (None, "a"), ("key_end", ""), (None, "x"), ("value_end", "")]),
        ("kimi_k3", [(None, 'call tool="book"'), SEPARATOR]),
        ("kimi_k3", [(None, 'call tool="look"'), SEPARATOR, (None, "x")]),
        ("gemma4", [(None, "call:book{")]),
        ("gemma4", [(None, "call:look{}"), (None, "x")]),
        ("gemma4", [("key_begin", "")]),
    ],
)
def test_another_form_breaks_a_call(name: str, lexemes: list[Lexeme]) -> None:
    call = FORMATS[name].pieces(FUNCTIONS)
    for mark, text in lexemes:
        if not call.is_broken:
            _ = call.text(text) if mark is None else call.mark(mark)
    assert call.is_broken


def test_what_is_complete_of_an_object() -> None:
    draw = random.Random("objects")
    for _ in range(40):
        given = arguments(draw)
        text, number = json.dumps(given, ensure_ascii=False), 0
        for end in range(len(text) + 1):
            found = json.loads(complete_object(text[:end]))
            assert list(found) == list(given)[: len(found)]
            assert len(found) >= number
            number = len(found)
            for key, value in list(found.items())[:-1]:
                assert value == given[key]
        assert found == given


def test_numbers_and_escapes_wait_for_their_end() -> None:
    value = JsonValue()
    pieces = [
        value.push_text(piece) for piece in ("[1", "2", ", 1.0e", '2, "a\\', "u00", "e9\\ud83d", "\\ude0", '0"', "]")
    ]
    assert pieces == ["[", "", "12, ", '100.0, "a', "", "é", "", '😀"', "]"]
    assert value.is_whole

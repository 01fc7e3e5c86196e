"""Grammars are compiled within limits, and vocabularies keep special tokens out of text."""

import json
from typing import Any

import pytest
from tables import table

from saccade.errors import InvalidValue
from saccade.grammars.compiler import Vocabulary, byte_vocabulary, compile_grammar
from saccade.protocol.request import Grammar

END = 256


def schema(value: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


def allowed(mask: bytes) -> set[int]:
    return {8 * place + bit for place, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1}


@pytest.mark.parametrize(
    ("grammar", "match"),
    [
        (schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}), '{"a": -7}'),
        (schema({}), "[1, true, null]"),
        (Grammar("regex", r"a b|c\|d"), "c|d"),
        (Grammar("lark", 'start: "x"+ NUMBER\nNUMBER: /[0-9]+/'), "xx12"),
    ],
)
def test_a_match_is_accepted_and_then_ends(grammar: Grammar, match: str) -> None:  # F13
    matcher = compile_grammar(byte_vocabulary(), grammar)
    assert matcher.consume_tokens(list(match.encode()))
    assert matcher.is_accepting()
    assert END in allowed(matcher.compute_bitmask())


@table(
    "grammar",
    [
        Grammar("regex", "(a"),
        Grammar("regex", "((a{100}){100}){100}"),  # one mask takes seconds
        Grammar("lark", "start: nothing"),
        Grammar("json_schema", "[1]"),
        Grammar("structural_tag", '{"type": "structural_tag"}'),
        schema({"enum": []}),
        schema({"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(20_000)}}),
    ],
)
def test_wrong_and_large_grammars_are_refused(grammar: Grammar) -> None:  # F13
    with pytest.raises(InvalidValue):
        compile_grammar(byte_vocabulary(), grammar)


@pytest.mark.parametrize("space", [b"", b" ", b"\n", b"\r\n", b"\n\n" + b" " * 20, b"\n" + b"\t" * 20])
def test_json_may_be_indented(space: bytes) -> None:
    matcher = compile_grammar(byte_vocabulary(), schema({"type": "array", "items": {"const": 1}}))
    answer = b"[" + space + b"1," + space + b"1" + space + b"]"
    assert matcher.try_consume_tokens(list(answer)) == len(answer)


@pytest.mark.parametrize("space", [b" ", b"\n\n", b"\n" + b" " * 20, b"\r\n\r\n" + b"\t" * 20])
def test_white_space_has_an_end(space: bytes) -> None:
    """Else a model that likes white space writes little else."""
    matcher = compile_grammar(byte_vocabulary(), schema({"type": "array"}))
    assert matcher.consume_tokens(list(b"[" + space))
    assert not allowed(matcher.compute_bitmask()) & set(b"\r\n" if space[-1:] == b"\n" else b" \t\r\n")


def test_special_and_empty_tokens_are_no_text() -> None:
    tokens = [*(bytes([byte]) for byte in range(256)), b"", b"<think>", b"<|end|>", b"<|stop|>"]
    vocabulary = Vocabulary(tokens, [257, 258, 259], [258, 259]).build()
    matcher = compile_grammar(vocabulary, Grammar("regex", ".*"))
    ids = allowed(matcher.compute_bitmask())
    assert not ids & {256, 257}
    assert ids >= {258, 259, ord("a")}  # both ends

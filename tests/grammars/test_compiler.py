"""Grammars are compiled within limits, and vocabularies keep special tokens out of text."""

import json
from typing import Any

import pytest
from tables import table

from saccade.errors import InvalidValue
from saccade.grammars.compiler import WHITE_SPACE, Vocabulary, byte_vocabulary, compile_grammar
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


def test_white_space_has_an_end() -> None:
    """Else a model that likes line breaks would never come to an end."""
    matcher = compile_grammar(byte_vocabulary(), schema({"type": "array"}))
    assert matcher.consume_tokens(list(b"[" + b" " * 40))
    assert ord(" ") not in allowed(matcher.compute_bitmask())
    assert "40" in WHITE_SPACE


def test_special_and_empty_tokens_are_no_text() -> None:
    tokens = [*(bytes([byte]) for byte in range(256)), b"", b"<think>", b"<|end|>", b"<|stop|>"]
    vocabulary = Vocabulary(tokens, [257, 258, 259], [258, 259]).build()
    matcher = compile_grammar(vocabulary, Grammar("regex", ".*"))
    ids = allowed(matcher.compute_bitmask())
    assert not ids & {256, 257}
    assert ids >= {258, 259, ord("a")}  # both ends

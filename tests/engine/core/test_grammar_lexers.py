"""Grammars whose lexer runs full: an answer goes on in a new lexer, and hurts no other one. F13"""

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from tables import table

from saccade.engine.core import grammar_lexers, grammar_matcher
from saccade.engine.core.grammar_lexers import CompiledGrammar, GrownLexers
from saccade.engine.core.grammar_matcher import GrammarMatcher, add_ids, no_words
from saccade.errors import InvalidValue
from saccade.gateway.structured_output.constraint import Constraint
from saccade.gateway.structured_output.trial import try_constraint
from saccade.grammars.compiler import MAX_LEXER_STATES, byte_vocabulary
from saccade.models.tool_formats.form import CallConstraint, FunctionConstraint, ToolCallTokens
from saccade.protocol.request import Grammar

VOCABULARY = byte_vocabulary()
SIZE, END = VOCABULARY.vocab_size, 256
USABLE, ENDS = (add_ids(no_words(SIZE), ids, SIZE) for ids in (range(SIZE), (END,)))
DISTINCT = {f"f{index}": 900 + index for index in range(6)}
ENDLESS = Grammar("regex", "x{70}((a{1,100}){1,100}){1,100}")
"""Its masks need more work than any lexer may do, but only behind the beginning that is tried."""


def schema(value: Any) -> Constraint:
    return Constraint("json_schema", json.dumps(value), "schema", strict=True)


def fields(bounds: dict[str, int]) -> dict[str, Any]:
    properties = {name: {"type": "string", "maxLength": bound} for name, bound in bounds.items()}
    return {"type": "object", "properties": properties, "required": list(bounds), "additionalProperties": False}


def called(form: str, *tag_ids: int) -> Constraint:
    functions = [FunctionConstraint("f", fields({"a": 2700}), "tools[0].function.parameters", strict=True)]
    calls = CallConstraint(functions, ToolCallTokens(form, *tag_ids), must_call=True, many=False)
    return Constraint("tool_calls", msgspec.json.encode(calls).decode(), "tools")


def compiled(constraint: Constraint) -> CompiledGrammar:
    outcome = try_constraint(constraint)
    assert outcome.grammar is not None, outcome.message
    return CompiledGrammar(VOCABULARY, outcome.grammar, GrownLexers())


def matcher_of(grammar: CompiledGrammar) -> GrammarMatcher:
    return GrammarMatcher(grammar, None, USABLE, ENDS)


def is_allowed(mask: bytes, token_id: int) -> bool:
    return bool(np.frombuffer(mask, np.uint32)[token_id // 32] >> (token_id % 32) & 1)


def written(matcher: GrammarMatcher, *parts: str | int) -> bool:
    """Whether the masks allow every byte of the texts among *parts*, and every id among them."""
    ids = (one for part in parts for one in (part.encode() if isinstance(part, str) else [part]))
    for token_id in ids:
        if matcher.is_finished or not is_allowed(matcher.mask(), token_id):
            return False
        matcher.take_token(token_id)
    return True


def ends(matcher: GrammarMatcher) -> bool:
    return matcher.is_finished or is_allowed(matcher.mask(), END)


PADDED = "ab\u00e9\u96ea " * 540
CASES: list[tuple[Constraint, list[str | int], list[str | int]]] = [
    (schema(fields({"a": 2700})), ['{"a": "', PADDED, '"}'], ['{"a": "', PADDED, "b"]),
    (
        schema({"type": "object", "properties": {"a": {"type": "string", "minLength": 2700}}, "required": ["a"]}),
        ['{"a": "', PADDED, '"}'],
        ['{"a": "', PADDED[1:], '"'],
    ),
    (schema({"type": "string", "pattern": "^[^z]{0,2700}$"}), ['"', PADDED, '"'], ['"', PADDED, "b"]),
    (schema({"type": "string", "pattern": "^(a|[b-y]){3,2700}!$"}), ['"', "by" * 1350, '!"'], ['"', "by" * 1350, "b"]),
    (schema({"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 2700}]}), ['"', "a" * 2700, '"'], ['"', "a" * 2701]),
    (
        schema({"type": "array", "items": {"type": "string", "maxLength": 700}, "maxItems": 6}),
        ["[", ", ".join(['"' + "a" * 700 + '"'] * 6), "]"],
        ['["', "a" * 701],
    ),
    (
        schema(fields(DISTINCT)),
        ["{", ", ".join(f'"{name}": "{"x" * bound}"' for name, bound in DISTINCT.items()), "}"],
        ['{"f0": "', "x" * 901],
    ),
    (
        schema({"type": "object", "additionalProperties": {"type": "string", "maxLength": 2700}}),
        ['{"k": "', "a" * 2700, '"}'],
        ['{"k": "', "a" * 2701],
    ),
    (
        schema({"$defs": {"t": {"type": "string", "maxLength": 2700}}, "type": "array", "items": {"$ref": "#/$defs/t"}}),
        ['["', "a" * 2700, '", "', "b" * 2700, '"]'],
        ['["', "a" * 2701],
    ),
    (called("hermes", 257, 258), [257, '\n{"name": "f", "arguments": {"a": "', PADDED, '"}}\n', 258], [257, '\n{"name": "f", "arguments": {"a": "', PADDED, "b"]),
    (
        called("gemma4", *range(257, 266)),
        [259, 257, "call:f{a:", 261, PADDED, 261, "}", 258, 260],
        [259, 257, "call:f{a:", 261, PADDED, "b"],
    ),
    (Constraint("regex", r"(.|\n){0,2700}", "guided_regex"), ["a\n" * 1350], ["a\n" * 1350, "b"]),
    (Constraint("regex", r"([a-z ]{3,9},){600,900}", "guided_regex"), ["abcde," * 600], ["abcde," * 599 + "ab,"]),
    (Constraint("grammar", 'start: A "."\nA: /[^.]{0,2700}/', "guided_grammar"), ["a" * 2700, "."], ["a" * 2701]),
    (Constraint("grammar", 'root ::= "<" [a-z]{0,2700} ">"', "guided_grammar"), ["<", "a" * 2700, ">"], ["<", "a" * 2701]),
]  # fmt: skip


@pytest.mark.ci
@table(("constraint", "answer", "too_long"), CASES, ids=[f"{case.kind}: {case.text[:60]}" for case, *_ in CASES])
def test_answers_end_at_the_bound_again_and_again(
    constraint: Constraint, answer: list[str | int], too_long: list[str | int]
) -> None:
    """A lexer of 20,000 states would be full after about 2,300 characters, of one answer or of several."""
    grammar = compiled(constraint)
    for _ in range(2):
        matcher = matcher_of(grammar)
        assert written(matcher, *answer)
        assert ends(matcher)
    assert not written(matcher_of(grammar), *too_long)


@table(
    ("constraint", "answer"),
    [
        (schema({"type": "string"}), ['"', "a" * 39_000, '"']),
        (schema(fields({f"f{index}": 255 for index in range(20)})), None),
        (schema({"type": "string", "maxLength": 40}), ['"', "a" * 40, '"']),
    ],
)
def test_texts_without_large_bounds_need_no_other_lexer(constraint: Constraint, answer: list[str | int] | None) -> None:
    grammar = compiled(constraint)
    first = grammar.lexer
    filled = "{" + ", ".join(f'"f{index}": "{"x" * 255}"' for index in range(20)) + "}"
    matcher = matcher_of(grammar)
    assert written(matcher, *(answer or [filled]))
    assert ends(matcher)
    assert (matcher_of(grammar), grammar.lexer, grammar.is_full)[1:] == (first, False)


def test_answers_at_the_same_time_share_the_new_lexer() -> None:
    grammar = compiled(schema(fields({"a": 2700})))
    matchers = [matcher_of(grammar) for _ in range(4)]
    assert all(written(matcher, '{"a": "') for matcher in matchers)
    for place in range(2700):
        assert all(written(matcher, "abcd"[(place + number) % 4]) for number, matcher in enumerate(matchers))
    larger = grammar.lexer
    assert larger.max_states > MAX_LEXER_STATES
    assert not grammar.is_full  # for an answer that begins now
    assert all(not is_allowed(matcher.mask(), ord("a")) and written(matcher, '"}') for matcher in matchers)
    assert grammar.lexer is larger
    del larger, matchers
    assert grammar.is_full


def test_larger_lexers_are_bounded_together_and_live_as_long_as_their_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_lexers, "GROWN_STATES", 200_000)
    grown, grammar = GrownLexers(), Grammar("regex", "a*")
    kept = [grown.add_lexer(VOCABULARY, grammar, 80_000) for _ in range(4)]
    assert [lexer.max_states for lexer in kept] == [80_000, 80_000, 40_000, MAX_LEXER_STATES]
    del kept[0]
    assert grown.add_lexer(VOCABULARY, grammar, 10**9).max_states == 60_000


def test_answer_goes_on_in_a_proposal() -> None:
    grammar = compiled(schema(fields({"a": 2700})))
    matcher, text = matcher_of(grammar), b"ab" * 1349
    assert written(matcher, '{"a": "')
    for start in range(0, len(text), 2):
        proposed = [*text[start : start + 2]]
        masks = matcher.masks_after(proposed)
        if len(masks) < 2:
            # The lexer became full: the proposal ends early, and the answer goes on.
            matcher.mask()
            masks = matcher.masks_after(proposed)
        assert all(is_allowed(mask, ord("a")) for mask in masks)
        assert len(masks) == 2
        for token_id in proposed:
            matcher.take_token(token_id)
    assert grammar.lexer.max_states > MAX_LEXER_STATES


def test_work_for_one_mask_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    lexers: list[int] = []
    grammar = CompiledGrammar(VOCABULARY, ENDLESS, GrownLexers())
    counted = grammar.replace

    def counting(full: grammar_lexers.Lexer) -> grammar_lexers.Lexer:
        lexers.append(full.max_states)
        return counted(full)

    monkeypatch.setattr(grammar, "replace", counting)
    matcher = matcher_of(grammar)
    with pytest.raises(InvalidValue):
        written(matcher, "x" * 70 + "a" * 100)
    assert 0 < len(lexers) <= grammar_matcher.LEXERS_AT_A_TOKEN + 1
    # An answer that does not go so far is not hurt.
    assert written(matcher_of(grammar), "x" * 70 + "a" * 10)

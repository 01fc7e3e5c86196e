"""A held schema's grammar writes every valid instance and no invalid one. F13

A selection of our own; `make json-schema-suite` runs the whole JSON Schema Test Suite.
"""

import json
from typing import Any

import jsonschema
import pytest
from tables import table

from saccade.gateway.structured_output.constraint import Constraint
from saccade.gateway.structured_output.trial import try_constraint
from saccade.grammars.compiler import byte_vocabulary, compile_grammar

CASES: list[tuple[dict[str, Any], list[Any]]] = [
    ({"type": "integer", "minimum": -3, "exclusiveMaximum": 12}, [-3, 0, 11, -4, 12, 1.5, "1", None]),
    ({"type": "number", "multipleOf": 0.5, "maximum": 2}, [2, -1.5, 0.5, 2.5, 0.25]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "雪😀x", "a", "abcd", 12]),
    ({"type": "string", "pattern": "^a+b?$"}, ["a", "aab", "b", "ab ", ""]),
    ({"type": "string", "pattern": "b"}, ["abc", "b", "ac", ""]),
    ({"type": "string", "format": "ipv4"}, ["127.0.0.1", "256.1.1.1", "1.2.3"]),
    ({"enum": ["a", 1, None, [1], {"k": "v"}]}, ["a", 1, None, [1], {"k": "v"}, "b", 2, False, [2], {"k": "w"}]),
    ({"const": 'a "quoted" \\ text\n'}, ['a "quoted" \\ text\n', "a quoted text"]),
    ({"type": ["string", "null"]}, ["", None, 0, False]),
    ({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}, [[True], [True, False], [], [1]]),
    ({"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "items": False}, [[], [1], [1, 2], [2], [1, 2, 3]]),
    (
        {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]},
        [{"a": 1}, {"a": 1, "b": 2}, {}, {"a": 2}],
    ),
    ({"properties": {"a": {}}, "additionalProperties": False}, [{}, {"a": [1]}, {"b": 1}, 3, "a"]),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, [{"x": 1}, {"x": "1"}]),
    ({"type": "object", "patternProperties": {"^n_": {"type": "null"}}}, [{"n_a": None}, {"b": 1}, {"n_a": 1}]),
    ({"type": "object", "minProperties": 1, "maxProperties": 1}, [{"x": 1}, {}, {"x": 1, "y": 2}]),
    ({"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}]}, [5, "a", "ab", 0.5]),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, [5, "a", None]),
    ({"type": "string", "minLength": 2.0, "maxLength": 3e0}, ["ab", "a", "abcd"]),
    ({"type": "string", "minLength": 1, "maxLength": 2**53}, ["ab", ""]),
    ({"type": "array", "minItems": 1.0, "maxItems": 2**63, "items": {"const": 1}}, [[1, 1], []]),
    ({"type": "array", "prefixItems": [{"const": 1}], "additionalItems": False}, [[1], [1, 2], [2]]),
    ({"type": "array", "items": [{"const": 1}], "additionalItems": False}, [[1], [1, 2], [2]]),
    ({"$schema": "my dialect", "type": "array", "prefixItems": [{"const": 1}], "items": False}, [[1], [1, 2]]),
    ({"allOf": [{"minimum": 3, "type": "integer"}, {"maximum": 5}]}, [3, 5, 2, 6]),
    (
        {"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}},
        [[], [[], [[]]], [1], [[], [{}]]],
    ),
]
IDS = [json.dumps(schema)[:40] for schema, _ in CASES]


@table(("schema", "instances"), CASES, ids=IDS)
def test_the_grammar_agrees_with_a_validator(schema: dict[str, Any], instances: list[Any]) -> None:
    outcome = try_constraint(Constraint("json_schema", json.dumps(schema), "schema", strict=True))
    assert outcome.grammar is not None
    compiled = compile_grammar(byte_vocabulary(), outcome.grammar)
    written = []
    for instance in instances:
        matcher, text = compiled.deep_copy(), json.dumps(instance, ensure_ascii=False).encode()
        written.append(matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting())
    draft = jsonschema.Draft7Validator if isinstance(schema.get("items"), list) else jsonschema.Draft202012Validator
    validator = draft(schema, format_checker=jsonschema.FormatChecker())
    expected = [validator.is_valid(instance) for instance in instances]
    assert written == expected
    assert set(expected) == {True, False}


def test_values_with_two_spellings_have_one() -> None:
    """Exceptions of docs/json-schema.md: valid, and never written."""
    for schema, text in (({"type": "integer"}, "1.0"), ({"const": 1}, "1.0"), ({"format": "date"}, '"today"')):
        outcome = try_constraint(Constraint("json_schema", json.dumps(schema), "schema", strict=True))
        assert outcome.grammar is not None
        matcher = compile_grammar(byte_vocabulary(), outcome.grammar)
        assert matcher.try_consume_tokens(list(text.encode())) < len(text) or not matcher.is_accepting()


@pytest.mark.parametrize("keyword", ["disallow", "divisibleBy", "extends"])
def test_keywords_of_the_oldest_drafts_are_not_passed_over(keyword: str) -> None:
    text = json.dumps({"type": "integer", keyword: 2})
    assert try_constraint(Constraint("json_schema", text, "schema", strict=True)).param == f"schema.{keyword}"
    assert try_constraint(Constraint("json_schema", text, "schema")).dropped == [f"schema.{keyword}"]

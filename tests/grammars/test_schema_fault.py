"""An impossible schema's error names the keyword at fault, its place, and what it contradicts. F13"""

import json
from typing import Any

import pytest
from tables import table

from saccade.errors import InvalidValue
from saccade.gateway.structured_output.constraint import Constraint
from saccade.gateway.structured_output.trial import try_constraint
from saccade.grammars.compiler import byte_vocabulary, compile_grammar
from saccade.grammars.json_schema import SchemaReader
from saccade.grammars.schema_places import Schema
from saccade.protocol.request import Grammar

TEXT = {"type": "string"}
REVERSED = {"type": "integer", "minimum": 5, "maximum": 3}
LACKING = {"type": "object", "properties": {"a": TEXT}, "required": ["x"], "additionalProperties": False}
SEVERAL = [
    ({"allOf": [LACKING]}, "allOf[0].required", "allOf[0].additionalProperties"),
    ({"anyOf": [LACKING, REVERSED]}, "anyOf[0].required", "anyOf[0].additionalProperties"),
    ({"oneOf": [LACKING]}, "oneOf[0].required", "oneOf[0].additionalProperties"),
    ({"oneOf": [{"oneOf": [LACKING]}]}, "oneOf[0].oneOf[0].required", "oneOf[0].oneOf[0].additionalProperties"),
    ({"$ref": "#/$defs/a", "$defs": {"a": LACKING}}, "$defs.a.required", "$defs.a.additionalProperties"),
    (
        {"type": "array", "minItems": 1, "items": {"$ref": "#/definitions/a"}, "definitions": {"a": REVERSED}},
        "definitions.a.minimum",
        "definitions.a.maximum",
    ),
    (
        {"type": "object", "properties": {"a": REVERSED, "b": {"$ref": "#/properties/a"}}, "required": ["b"]},
        "properties.a.minimum",
        "properties.a.maximum",
    ),
    (
        {"type": "object", "properties": {"p": LACKING, "q": {"enum": []}}, "required": ["p"]},
        "properties.p.required",
        "properties.p.additionalProperties",
    ),
    (
        {"type": "object", "additionalProperties": REVERSED, "required": ["a"]},
        "additionalProperties.minimum",
        "additionalProperties.maximum",
    ),
    (
        {"$ref": "#/$defs/a", "$defs": {"a": {"required": ["x"]}}, "type": "object", "additionalProperties": False},
        "$defs.a.required",
        "additionalProperties",
    ),
    (
        {"type": "object", "anyOf": [{"required": ["x"]}, {"required": ["y"]}], "additionalProperties": False},
        "anyOf[0].required",
        "additionalProperties",
    ),
    ({"allOf": [{"type": "integer", "minimum": 5}, {"maximum": 3}]}, "allOf[0].minimum", "allOf[1].maximum"),
    ({"allOf": [{"type": "integer"}, TEXT]}, "allOf[0].type", "allOf[1].type"),
]
PAIRS = [
    (LACKING, "required", "additionalProperties"),
    ({**LACKING, "properties": {"a": {"enum": []}}}, "required", "additionalProperties"),
    ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "required", "properties"),
    (
        {"type": "object", "patternProperties": {"^x": TEXT}, "additionalProperties": False, "required": ["y"]},
        "required",
        "additionalProperties",
    ),
    ({"type": "object", "required": ["a", "b"], "maxProperties": 1}, "required", "maxProperties"),
    ({"const": {"a": 1}, "type": "object", "required": ["b"]}, "required", "const"),
    ({"type": "object", "minProperties": 3, "maxProperties": 1}, "minProperties", "maxProperties"),
    ({"type": "object", "additionalProperties": False, "minProperties": 1}, "minProperties", "additionalProperties"),
    ({"type": "array", "minItems": 5, "maxItems": 3}, "minItems", "maxItems"),
    ({"type": "array", "items": False, "minItems": 1}, "minItems", "items"),
    ({"type": "array", "prefixItems": [TEXT, False], "minItems": 2}, "minItems", "prefixItems"),
    (REVERSED, "minimum", "maximum"),
    ({"type": "number", "exclusiveMinimum": 3, "exclusiveMaximum": 3}, "exclusiveMinimum", "exclusiveMaximum"),
    ({"type": "integer", "minimum": 1, "maximum": 2, "multipleOf": 5}, "multipleOf", "maximum"),
    ({"enum": [1, 2], "minimum": 5}, "minimum", "enum"),
    ({"type": "integer", "enum": ["a"]}, "enum", "type"),
    ({"enum": ["a", "b"], "const": "c"}, "const", "enum"),
    ({"type": "string", "const": 5}, "const", "type"),
    ({"type": "string", "pattern": "^a+$", "const": "b"}, "const", "pattern"),
    ({"type": "string", "minLength": 5, "maxLength": 3}, "minLength", "maxLength"),
    ({"type": "string", "pattern": "^a$", "minLength": 3}, "minLength", "pattern"),
    ({"type": "string", "format": "date", "maxLength": 3}, "format", "maxLength"),
]
ALONE = [
    ({"enum": []}, "enum"),
    ({"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]}, "properties.a.enum"),
    ({"type": []}, "type"),
    ({"anyOf": []}, "anyOf"),
    ({"allOf": [TEXT, False]}, "allOf"),
    ({"oneOf": [TEXT, TEXT]}, "oneOf"),
    ({"type": "string", "pattern": "(", "minLength": 3}, "pattern"),
    ({"type": "string", "minLength": -1}, "minLength"),
    ({"type": "string", "minLength": 2**33, "maxLength": 2**34}, "minLength"),
    ({"type": "integer", "minimum": "x"}, "minimum"),
    ({"type": "object", "required": "x"}, "required"),
    ({"type": "object", "properties": {"a": 5}}, "properties"),
    ({"$ref": "#"}, "$ref"),
    ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "$defs.a.$ref"),
]
VOCABULARY = byte_vocabulary()


def error_of(schema: Any, strict: bool = True) -> tuple[str | None, str]:
    outcome = try_constraint(Constraint("json_schema", json.dumps(schema), "s", strict))
    assert outcome.code == InvalidValue.code
    return outcome.param, outcome.message


@table(("schema", "at_fault", "other"), PAIRS + SEVERAL)
def test_keywords_that_contradict_one_another_are_named(schema: Any, at_fault: str, other: str) -> None:
    for strict in (True, False):
        param, message = error_of(schema, strict)
        assert param == f"s.{at_fault}"
        assert f"`s.{at_fault}`" in message
        assert f"`s.{other}`" in message


@table(("schema", "at_fault"), ALONE)
def test_a_keyword_that_no_value_matches_is_named(schema: Any, at_fault: str) -> None:
    param, message = error_of(schema)
    assert param == f"s.{at_fault}"
    assert message.startswith(f"`s.{at_fault}` ")


def test_missing_properties_are_named() -> None:
    assert "`s.required` (x, y)" in error_of({**LACKING, "required": ["x", "a", "y"]})[1]


@table(
    "schema",
    [
        {"type": "object", "properties": {"a": {"enum": []}}},
        {"anyOf": [TEXT, REVERSED]},
        {"type": "object", "additionalProperties": REVERSED},
        {"$defs": {"unused": REVERSED}, **TEXT},
        {"type": "array", "items": REVERSED},
    ],
)
def test_impossible_parts_that_need_not_be_written_do_no_harm(schema: Any) -> None:
    assert try_constraint(Constraint("json_schema", json.dumps(schema), "s", strict=True)).grammar is not None


def test_the_search_for_the_fault_is_bounded() -> None:
    trials = 0

    def compiles(schema: Schema) -> bool:
        nonlocal trials
        trials += 1
        try:
            compile_grammar(VOCABULARY, Grammar("json_schema", json.dumps(schema)))
        except InvalidValue:
            return False
        return True

    properties = {f"p{index}": REVERSED for index in range(2000)}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    with pytest.raises(InvalidValue) as error:
        SchemaReader("s", True, compiles).read_schema(json.dumps(schema))
    assert str(error.value.param).startswith("s")
    assert trials < 300

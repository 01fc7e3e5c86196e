"""What of a schema is held, what is refused, and where."""

import json
from typing import Any

import pytest
from tables import table

from saccade.errors import InvalidValue, RequestError, UnsupportedParameter
from saccade.grammars.compiler import byte_vocabulary, compile_grammar
from saccade.grammars.json_schema import FORMATS, NOT_HELD, SchemaReader, SupportedSchema
from saccade.grammars.schema_places import Schema
from saccade.protocol.request import Grammar

TEXT = {"type": "string"}


def compiles(schema: Schema) -> bool:
    try:
        compile_grammar(byte_vocabulary(), Grammar("json_schema", json.dumps(schema)))
    except InvalidValue:
        return False
    return True


def read(schema: Any, strict: bool = False) -> SupportedSchema:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return SchemaReader("schema", strict, compiles).read_schema(text)


OLDEST = ("disallow", "divisibleBy", "extends")
"""Keywords of drafts before 4."""


@table("keyword", sorted(NOT_HELD))
def test_keywords_that_no_grammar_holds(keyword: str) -> None:  # F13
    schema = {"properties": {"a": {keyword: {}, **TEXT}}}
    with pytest.raises(UnsupportedParameter) as error:
        read(schema, strict=True)
    assert error.value.param == f"schema.properties.a.{keyword}"
    held = read(schema)
    assert held.dropped == [f"schema.properties.a.{keyword}"]
    assert held.schema == {"properties": {"a": TEXT}}
    # And llguidance does refuse it, so that it would not be ignored, unless it does not know it.
    assert compiles({keyword: {}}) == (keyword in OLDEST)


def test_defaults_mean_nothing() -> None:
    schema = {"type": "array", "uniqueItems": False, "unevaluatedItems": True}
    assert read(schema, strict=True) == SupportedSchema({"type": "array"})


def test_names_of_properties_are_no_keywords() -> None:
    schema = {"type": "object", "properties": {"not": TEXT, "x-guidance": TEXT}, "required": ["not"]}
    assert read(schema, strict=True).schema == schema


def test_a_clients_options_for_the_library_are_dropped() -> None:
    with pytest.raises(UnsupportedParameter):
        read({"x-guidance": {"lenient": True}, "not": {}}, strict=True)


@table("name", sorted(FORMATS))
def test_supported_formats(name: str) -> None:
    assert read({"type": "string", "format": name}, strict=True).dropped == []


def test_other_formats_are_named() -> None:
    assert read({"type": "string", "format": "binary"}).dropped == ["schema.format"]


@table(
    ("schema", "param"),
    [
        ({"properties": {"a": {"$ref": "http://elsewhere/x"}}}, "schema.properties.a.$ref"),
        ({"items": {"oneOf": [TEXT, {"type": "string", "minLength": 1}]}}, "schema.items.oneOf"),
        ({"properties": {"a": {"items": {"type": "strin"}}}}, "schema.properties.a.items.type"),
        ({"$defs": {"x": {"type": "string", "pattern": "a(?=b)"}}, "$ref": "#/$defs/x"}, "schema.$defs.x.pattern"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "schema.required"),
        ({"$ref": "#/$defs/none"}, "schema.$ref"),
        ("[1]", "schema"),
        ("{", "schema"),
        ("false", "schema"),
        ('{"items":' * 100 + "{}" + "}" * 100, "schema"),
        ('{"items":' * 5000 + "{}" + "}" * 5000, "schema"),
        ({"anyOf": [TEXT] * 11_000}, "schema"),
    ],
)
def test_place_of_the_error_is_named(schema: Any, param: str) -> None:  # F13
    with pytest.raises(RequestError) as error:
        read(schema, strict=True)
    assert error.value.param == param
    assert error.value.message.endswith(".")


def test_overlapping_schemas_are_widened_unless_strict() -> None:
    overlapping = {"oneOf": [TEXT, {"type": "string", "minLength": 1}]}
    held = read({"properties": {"a": overlapping, "b": {"pattern": "(?!x)", **TEXT}}})
    assert held.dropped == ["schema.properties.a.oneOf", "schema.properties.b.pattern"]
    assert held.schema == {"properties": {"a": {"anyOf": overlapping["oneOf"]}, "b": TEXT}}

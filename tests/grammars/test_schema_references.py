"""References within a schema are found by pointer, anchor and identifier, and nothing else depends on those. F13"""

import json
from typing import Any

import msgspec
import pytest
from tables import table

from saccade.errors import InvalidValue
from saccade.gateway.structured_output.constraint import Constraint
from saccade.gateway.structured_output.trial import try_constraint
from saccade.grammars.compiler import FIRST_TAG_ID, byte_vocabulary, compile_grammar
from saccade.grammars.schema_references import resolve_references
from saccade.models.tool_formats.form import CallConstraint, FunctionConstraint, ToolCallTokens

pytestmark = pytest.mark.ci

WORD = {"const": "word"}
OBJECT = {"type": "object", "properties": {"a": WORD}, "required": ["a"], "additionalProperties": False}
TREE = "https://example.com/tree.json"
UNQUOTED = (
    "order form",
    "gr\u00f6\u00dfe",
    "List<User>",
    "Response[User]",
    "100%",
    'a"b',
    "a#b",
    "a|b",
    "a{b}",
    "a^b",
    "a\\b",
)
"""Names that a URI cannot have as they are; most who write references do not quote them."""

VOCABULARY = byte_vocabulary()

SAY_NOTHING: list[dict[str, Any]] = [
    {"$id": "https://example.com/a.json"},
    {"$id": "order form"},
    {"$id": "#user"},
    {"$id": "https://example.com/a.json#/properties"},
    {"$id": "http://[wrong"},
    {"$id": 5},
    {"id": "order form"},
    {"id": "#user", "$schema": "http://json-schema.org/draft-04/schema#"},
    {"$schema": "http://json-schema.org/draft-07/schema#"},
    {"$schema": "https://json-schema.org/draft-07/schema#"},
    {"$schema": "http://json-schema.org/schema#"},
    {"$schema": "https://example.com/dialect"},
    {"$schema": "my dialect"},
    {"$schema": None},
    {"$anchor": "user"},
    {"$anchor": "no anchor"},
    {"$dynamicAnchor": "node"},
    {"$recursiveAnchor": True},
    {"$comment": "text"},
    {"$vocabulary": {"https://json-schema.org/draft/2020-12/vocab/core": True}},
    {"title": 5, "description": None, "default": {}, "examples": [1], "example": 1, "deprecated": True},
    {"readOnly": True, "writeOnly": False, "nullable": True, "discriminator": {"propertyName": "a"}},
    {"contentEncoding": "base64", "contentMediaType": "image/png", "contentSchema": {"$id": "order form"}},
    {"x-order": {"$id": "order form", "$ref": "elsewhere"}, "enumNames": ["a"], "propertyOrdering": ["a"]},
    {"$defs": {"unused": {"$id": "order form", "$schema": "my dialect"}}},
]


def called(parameters: dict[str, Any], form: str, strict: bool) -> Constraint:
    tags = ToolCallTokens(form, *range(FIRST_TAG_ID, FIRST_TAG_ID + 9))
    functions = [FunctionConstraint("f", parameters, "tools[0].function.parameters", strict)]
    calls = CallConstraint(functions, tags, must_call=True, many=False)
    return Constraint("tool_calls", msgspec.json.encode(calls).decode(), "tools")


def writes(schema: Any, text: str) -> bool:
    outcome = try_constraint(Constraint("json_schema", json.dumps(schema), "s", strict=True))
    assert outcome.grammar is not None, outcome.message
    matcher = compile_grammar(VOCABULARY, outcome.grammar)
    return matcher.try_consume_tokens(list(text.encode())) == len(text) and matcher.is_accepting()


@table("extra", SAY_NOTHING)
def test_keywords_that_no_value_depends_on(extra: dict[str, Any]) -> None:
    """At the root and in parts; in schemas and functions, strict or not."""
    nested = {**OBJECT, "properties": {"a": {**WORD, **extra}}}
    for schema in ({**OBJECT, **extra}, nested):
        for strict in (True, False):
            outcome = try_constraint(Constraint("json_schema", json.dumps(schema), "s", strict))
            assert outcome.grammar is not None, outcome.message
            assert outcome.dropped == []
            for form in ("hermes", "qwen3_coder", "gemma4", "kimi_k3"):
                outcome = try_constraint(called(schema, form, strict))
                assert outcome.grammar is not None, outcome.message
        assert writes(schema, '{"a": "word"}')
        assert not writes(schema, '{"a": "other"}')


@table(
    "schema",
    [
        {"$ref": "#/$defs/w", "$defs": {"w": WORD}},
        {"$ref": "#/$defs/a~1b%20c~0d", "$defs": {"a/b c~d": WORD}},
        *({"$ref": f"#/$defs/{name}", "$defs": {name: WORD}} for name in UNQUOTED),
        {
            "$ref": "#/definitions/of users/properties/\u540d",
            "definitions": {"of users": {"properties": {"\u540d": WORD}}},
        },
        {"$ref": "#/$defs/list/prefixItems/0", "$defs": {"list": {"prefixItems": [WORD]}}},
        {"$ref": "#/components/schemas/W", "components": {"schemas": {"W": WORD}}},
        {"$ref": "#/components/V", "components": {"V": {"$ref": "#/components/W"}, "W": WORD}},
        {"$ref": "#w", "$defs": {"w": {"$anchor": "w", **WORD}}},
        {"$ref": "#w", "$defs": {"w": {"$dynamicAnchor": "w", **WORD}}},
        {"$ref": "#w", "definitions": {"w": {"$id": "#w", **WORD}}},
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "$ref": "#w",
            "definitions": {"w": {"id": "#w", **WORD}},
        },
        {"$id": TREE, "$ref": "#/$defs/w", "$defs": {"w": WORD}},
        {"$id": TREE, "$ref": f"{TREE}#/$defs/w", "$defs": {"w": WORD}},
        {"$id": TREE, "$ref": "tree.json#w", "$defs": {"w": {"$anchor": "w", **WORD}}},
        {"$id": TREE, "$ref": "word.json", "$defs": {"w": {"$id": "word.json", **WORD}}},
        {"$id": "urn:example:tree", "$ref": "#/$defs/w", "$defs": {"w": WORD}},
        {"$ref": "word form", "$defs": {"w": {"$id": "word form", **WORD}}},
        # A pointer is relative to the schema with a URI that it is in, and else to the root.
        {
            "$defs": {"w": {"const": "other"}},
            "allOf": [{"$id": "x", "allOf": [{"$ref": "#/$defs/w"}], "$defs": {"w": WORD}}],
        },
        {"$defs": {"w": WORD}, "allOf": [{"$id": "x", "$ref": "#/$defs/w"}]},
    ],
)
def test_references_within_a_schema(schema: dict[str, Any]) -> None:
    assert writes(schema, '"word"')
    assert not writes(schema, '"other"')


@table(
    ("schema", "place"),
    [
        ({"$ref": "https://elsewhere.example/x"}, "$ref"),
        ({"$ref": "other.json#/$defs/x"}, "$ref"),
        ({"$id": TREE, "properties": {"a": {"$ref": "leaf.json"}}}, "properties.a.$ref"),
        ({"$ref": "#/$defs/none"}, "$ref"),
        ({"$ref": "#none"}, "$ref"),
        ({"$ref": "#/prefixItems/" + "9" * 5000, "prefixItems": [WORD]}, "$ref"),
        ({"$ref": "#/prefixItems/" + "0" * 5000 + "1", "prefixItems": [WORD]}, "$ref"),
        ({"$ref": "#/prefixItems/-1", "prefixItems": [WORD]}, "$ref"),
        ({"$ref": "#/prefixItems/\u0660", "prefixItems": [WORD]}, "$ref"),
        ({"$ref": "#/$defs/w/const", "$defs": {"w": WORD}}, "$ref"),
        ({"$ref": 5}, "$ref"),
        # Drafts up to 7 mean the root's, later ones the part's.
        (
            {"$defs": {"w": {"const": 1}}, "allOf": [{"$id": "x", "$ref": "#/$defs/w", "$defs": {"w": WORD}}]},
            "allOf[0].$ref",
        ),
        ({"$ref": "#/x/A", "x": {"A": {"items": {"$ref": "elsewhere"}}}}, "x.A.items.$ref"),
    ],
)
def test_references_to_other_documents_are_refused_by_their_name(schema: dict[str, Any], place: str) -> None:
    for strict in (True, False):
        outcome = try_constraint(Constraint("json_schema", json.dumps(schema), "s", strict))
        assert (outcome.code, outcome.param) == (InvalidValue.code, f"s.{place}")


def test_identifiers_go_and_pointers_stay() -> None:
    schema = {"$id": TREE, "items": {"$ref": "#"}, "properties": {"$id": WORD, "$ref": WORD}, "required": ["$id"]}
    resolve_references(schema, "s")
    assert schema == {"items": {"$ref": "#"}, "properties": {"$id": WORD, "$ref": WORD}, "required": ["$id"]}


def test_places_that_only_references_reach_are_read_too() -> None:
    schema = {"$ref": "#/x/A", "x": {"A": {"type": "array", "uniqueItems": True}}}
    outcome = try_constraint(Constraint("json_schema", json.dumps(schema), "s"))
    assert outcome.dropped == ["s.x.A.uniqueItems"]


def test_references_in_a_circle_are_read_once() -> None:
    with pytest.raises(InvalidValue, match="10000 schemas"):
        resolve_references({"allOf": [{"$ref": "#"}] * 11_000}, "s")
    assert len(resolve_references({"anyOf": [{"$ref": "#"}, WORD]}, "s")) == 3

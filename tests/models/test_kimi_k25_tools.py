"""Kimi-K2.5's tools as its own code declares them. F13

The expected texts were compared with the release's tool_declaration_ts.py outside this repository, and 60,000 random
schemas, valid and not, beside them.
"""

from typing import Any

from tables import table

from saccade.models.tool_formats.kimi_k2 import tool_variables


def declared(*functions: dict[str, Any]) -> str | None:
    return tool_variables([{"type": "function", "function": function} for function in functions]).get("tools_ts_str")


def test_required_properties_come_first_and_bounds_are_comments() -> None:
    weather = {
        "name": "get_weather",
        "description": "The weather.\n\nNow.",
        "parameters": {
            "type": "object",
            "properties": {
                "unit": {"enum": ["c", "f", None], "default": "c", "description": "Of the temperature"},
                "city": {"type": "string", "minLength": 1, "pattern": "^[A-Z]"},
                "at": {"type": "array", "items": {"type": "number", "maximum": 90}, "maxItems": 2},
                "days": {"type": ["integer", "null"]},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    }
    assert (
        declared(weather, {"name": "now"})
        == """\
# Tools

## functions
namespace functions {
// The weather.

// Now.
type get_weather = (_: {
  // minLength: 1, pattern: ^[A-Z]
  city: string,
  // maxItems: 2
  at?: Array<
    // maximum: 90
    number
  >,
  days?: number | null,
  // Of the temperature
  // Default: "c"
  unit?: "c" | "f" | None,
  [k: string]: never
}) => any;
type now = (_: {}) => any;
}
"""
    )


def test_references_are_interfaces() -> None:
    parameters = {
        "type": "object",
        "properties": {
            "box": {"$ref": "#/$defs/Box", "description": "Where"},
            "deep": {"type": "object", "properties": {"x": {"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/Box"}]}}},
        },
        "$defs": {"Box": {"type": "array", "items": {"type": "integer"}, "description": "Four edges"}},
    }
    assert (
        declared({"name": "crop", "parameters": parameters})
        == """\
# Tools

## functions
namespace functions {
// Four edges
interface Box Array<number>
type crop = (_: {
  // Where
  box?: Box,
  deep?: {
    x?: boolean | Box
  }
}) => any;
}
"""
    )
    tree = {"type": "object", "properties": {"z": {}, "left": {"$ref": "#"}}, "required": ["z"]}
    assert (
        declared({"name": "f", "parameters": tree})
        == """\
# Tools

## functions
namespace functions {
interface parameters {
  left?: parameters,
  z: any
}
type f = (_: parameters) => any;
}
"""
    )


@table(
    "schema",
    [
        {"$ref": "#/$defs/Unknown"},
        {"$ref": "https://example.com"},
        {"description": "of no type"},
        {"oneOf": [{"type": "string"}]},
        {"type": ["string", "text"]},
        {"type": "integer", "enum": ["a"]},
        {"type": "object", "additionalProperties": "no"},
        {"type": "string", "description": 3},
    ],
)
def test_schemas_without_an_interface_form_are_left_to_the_template(schema: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"b": schema}, "$defs": {}}}}
    assert tool_variables([tool]) == {"tools": [tool]}


def test_keys_are_sorted() -> None:
    """The template writes JSON where there is no TypeScript."""
    tool = {"type": "function", "function": {"parameters": {"properties": {"b": {"x": 1}, "a": [{"d": 1, "c": 2}]}}}}
    tool["function"]["name"] = "f"
    (ordered,) = tool_variables([tool])["tools"]
    assert list(ordered) == ["function", "type"]
    assert list(ordered["function"]) == ["name", "parameters"]
    assert list(ordered["function"]["parameters"]["properties"]) == ["a", "b"]
    assert list(ordered["function"]["parameters"]["properties"]["a"][0]) == ["c", "d"]

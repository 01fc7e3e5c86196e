"""Texts of calls, read by format: what is a call, what is none, and which types its arguments have."""

import json
from collections.abc import Sequence
from typing import Any, get_args

from tables import table

from saccade.gateway.output.call_reader import declared
from saccade.grammars.property_types import typed
from saccade.models.family import ToolParser
from saccade.models.tool_formats import FORMATS
from saccade.models.tool_formats.form import ParsedCall

PARAMETERS = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "size": {"type": "number"},
        "flag": {"type": "boolean"},
        "list": {"type": "array"},
        "box": {"$ref": "#/$defs/Box"},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "either": {"type": ["string", "integer"]},
        "level": {"enum": [1, 2]},
        "open": {"description": "Anything."},
        "loop": {"$ref": "#/properties/loop"},
        "float": {"type": "float"},
        "other": {"type": ["dict", "list", "int", "bool"]},
    },
    "$defs": {"Box": {"type": "object"}},
}
FUNCTIONS = declared([{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}])


def test_every_form_may_be_chosen_by_the_operator() -> None:
    assert set(get_args(ToolParser)) == {"auto", "none", *FORMATS}


def parse(tool_format: str, *parts: str) -> ParsedCall | None:
    return FORMATS[tool_format].parse(parts, FUNCTIONS)


@table(
    ("tool_format", "parts", "arguments"),
    [
        ("hermes", ['\n{"name": "f", "arguments": {"text": "é\\n"}}\n'], {"text": "é\n"}),
        ("hermes", ['{"arguments":{},"name":"f"}'], {}),
        ("qwen3_coder", ["\n<function=f>\n</function>\n"], {}),
        ("qwen3_coder", ["<function=f><parameter=text>a</parameter></function>"], {"text": "a"}),
        ("qwen3_coder", ["<function=f>\n<parameter=text>\n\na\n\n</parameter>\n</function>"], {"text": "\na\n"}),
        (
            "qwen3_coder",
            ["<function=f>\n<parameter=text>\na</parameter> b\n</parameter>\n<parameter=count>\n3\n</parameter>\n</function>"],
            {"text": "a</parameter> b", "count": 3},
        ),
        ("qwen3_coder", ["<function=f><parameter=text>a</function>"], {"text": "a"}),
        ("qwen3_coder", ["<function=f><parameter=text>a</parameter>"], {"text": "a"}),
        ("glm45", ["f\n<arg_key>text</arg_key>\n<arg_value>a"], {"text": "a"}),
        ("glm45", ["f\n"], {}),
        ("glm45", ["f"], {}),
        ("glm45", ["\nf\n<arg_key>text</arg_key>\n<arg_value>\na\n</arg_value>\n"], {"text": "\na\n"}),
        (
            "glm45",
            ["f<arg_key>text</arg_key><arg_value>a</arg_value> b</arg_value><arg_key>count</arg_key>  <arg_value>3</arg_value>"],
            {"text": "a</arg_value> b", "count": 3},
        ),
        ("kimi_k2", ["functions.f:3", '{"text": "a"}'], {"text": "a"}),
        ("kimi_k2", ["f", "{}"], {}),
    ],
)  # fmt: skip
def test_calls(tool_format: str, parts: Sequence[str], arguments: dict[str, Any]) -> None:
    call = parse(tool_format, *parts)
    assert call is not None
    assert (call.name, call.arguments) == ("f", json.dumps(arguments, ensure_ascii=False))
    assert call.id == (parts[0] if tool_format == "kimi_k2" else None)


@table(
    ("tool_format", "parts"),
    [
        ("hermes", [""]),
        ("hermes", ["{"]),
        ("hermes", ["[" * 100_000]),
        ("hermes", ['{"name": "g", "arguments": {}}']),
        ("hermes", ['{"name": "f", "arguments": "{}"}']),
        ("hermes", ['{"name": "f", "arguments": {"a": NaN}}']),
        ("hermes", ['{"name": "f", "arguments": {"a": "\\ud800"}}']),
        ("hermes", ['{"name": "f", "arguments": {}} x']),
        ("qwen3_coder", ["<function=g></function>"]),
        ("qwen3_coder", ["<function=f>"]),
        ("qwen3_coder", ["<function=f>a</function>"]),
        ("qwen3_coder", ["<function=f><parameter=text>a</parameter>b</function>"]),
        ("qwen3_coder", ['{"name": "f", "arguments": {}}']),
        ("glm45", [""]),
        ("glm45", ["g\n"]),
        ("glm45", ["f a\n"]),
        ("glm45", ["f\n<arg_key>text</arg_key>\n"]),
        ("glm45", ["f\n<arg_key>text</arg_key>\n<arg_value>a</arg_value>b"]),
        ("kimi_k2", ["functions.f:0"]),
        ("kimi_k2", ["functions.f:0", "{}", "{}"]),
        ("kimi_k2", ["functions.g:0", "{}"]),
        ("kimi_k2", ["functions.f:0", "[]"]),
        ("kimi_k2", ["functions.f:0", "{"]),
    ],
)
def test_malformed_calls(tool_format: str, parts: Sequence[str]) -> None:
    assert parse(tool_format, *parts) is None


@table(
    ("name", "text", "value"),
    [
        ("text", "3", "3"), ("text", "null", "null"), ("text", "", ""), ("text", "{}", "{}"),
        ("count", "3", 3), ("count", " 3 ", 3), ("count", "3.0", 3), ("count", "3.5", "3.5"), ("count", "x", "x"),
        ("count", "true", "true"), ("size", "3", 3), ("size", "3.5", 3.5), ("size", "1e400", "1e400"),
        ("flag", "true", True), ("flag", "False", False), ("flag", "1", "1"), ("list", "[1, 2]", [1, 2]),
        ("list", "{}", "{}"), ("box", '{"a": "é"}', {"a": "é"}), ("maybe", "null", None), ("maybe", "None", None),
        ("maybe", "4", 4), ("either", "4", 4), ("either", "four", "four"), ("level", "2", 2), ("open", "2", "2"),
        ("loop", "2", "2"), ("unknown", "2", "2"), ("list", "[" * 100_000, "[" * 100_000),
        ("float", "20.5", 20.5), ("float", "20", 20), ("float", "warm", "warm"), ("other", '{"a": 1}', {"a": 1}),
        ("other", "[1]", [1]), ("other", "3", 3), ("other", "True", True), ("other", "3.5", "3.5"),
        ("list", '[\\"a\\", \\"b c\\"]', ["a", "b c"]), ("list", '["a\\"b"]', ['a"b']), ("list", '[\\"a]', '[\\"a]'),
        ("box", '{\\"a\\": [1, \\"b\\"]}', {"a": [1, "b"]}), ("text", '[\\"a\\"]', '[\\"a\\"]'),
    ],
)  # fmt: skip
def test_values_are_typed_by_the_schema(name: str, text: str, value: Any) -> None:
    found = typed(text, name, PARAMETERS)
    assert found == value
    assert type(found) is type(value)


@table("schema", [{}, {"properties": None}, {"properties": {"a": True}}, {"properties": {"a": {"type": 3}}},
                                    {"properties": {"a": {"$ref": "http://x/"}}}, {"properties": {"a": {"anyOf": 1}}}])  # fmt: skip
def test_a_schema_of_any_shape_leaves_texts(schema: dict[str, Any]) -> None:
    assert typed("2", "a", schema) == "2"

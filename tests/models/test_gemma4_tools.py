"""Gemma 4's calls of tools: text and strings between tokens to calls, and schemas to their grammar."""

import json
from typing import Any

import pytest
from tables import table
from test_tool_call_grammar import BEGIN, END, SEPARATOR, allows, grammar

from saccade.errors import InvalidValue, UnsupportedParameter
from saccade.models.tool_formats.gemma4 import parse

FUNCTIONS: dict[str, dict[str, Any]] = {"f": {}, "a.b-c": {}}
Q = '<|"|>'


def read(text: str) -> Any:
    call = parse(text.split(Q), FUNCTIONS)
    return None if call is None else (call.name, json.loads(call.arguments))


@table(
    ("text", "arguments"),
    [
        ("call:f{}", {}),
        (" call:f{a:1,b:-2.5e3,c:true,d:null,e:None} ", {"a": 1, "b": -2500.0, "c": True, "d": None, "e": None}),
        (f"call:f{{a:{Q}x{Q},b:[{Q}y{Q},{Q}{Q}]}}", {"a": "x", "b": ["y", ""]}),
        (f'call:f{{a:{Q}{{b:1}},[c]: "d" \\ \n{Q}}}', {"a": '{b:1},[c]: "d" \\ \n'}),
        (f"call:f{{a:{{b:{{c:{Q}z{Q}}},d:[1,{{e:2}}]}}}}", {"a": {"b": {"c": "z"}, "d": [1, {"e": 2}]}}),
        (f"call:f{{{Q}a b{Q}:1, two words :2}}", {"a b": 1, "two words": 2}),
        ("call:f{ a : [None, 1] }", {"a": [None, 1]}),
        (":f{a:1}", {"a": 1}),
        ("f{a:1}", {"a": 1}),
        ("call : f {a:1}", {"a": 1}),
        ("call:f{a:007}", {"a": "007"}),
        ('call:f{a:"b, {c}"}', {"a": "b, {c}"}),
    ],
)
def test_arguments(text: str, arguments: dict[str, Any]) -> None:
    assert read(text) == ("f", arguments)


@table("text", ["call:g{}", "call:f", "f", "call:f{a:}", "call:f{a:1", f"call:f{{a:{Q}x}}", "call:f[1]", "call:f{a:b}"])
def test_what_is_no_call(text: str) -> None:
    assert read(text) is None


TYPED = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "size": {"type": "float"},
        "flag": {"type": "boolean"},
        "either": {"type": ["string", "integer"]},
        "texts": {"type": "array", "items": {"type": "string"}},
        "deep": {"$ref": "#/$defs/deep"},
        "maybe": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"code": {"type": "string"}}}]},
    },
    "$defs": {"deep": {"type": "object", "properties": {"code": {"type": "string"}}}},
}


@table(
    ("text", "arguments"),
    [
        ("text:90210", {"text": "90210"}), ("text:01234", {"text": "01234"}), ("text:true", {"text": "true"}),
        ("text:Bern", {"text": "Bern"}), ("text:two words", {"text": "two words"}), ("text:null", {"text": None}),
        ("text:http://a.b/c", {"text": "http://a.b/c"}), ("text:3.50,count:3", {"text": "3.50", "count": 3}),
        (f"text:{Q}true{Q}", {"text": "true"}), ('text:"a"', {"text": "a"}), ("count:01234", {"count": 1234}),
        ("count:3.0", {"count": 3}), ("size:2", {"size": 2}), ("size:2.5", {"size": 2.5}), ("flag:true", {"flag": True}),
        ("either:4", {"either": 4}), ("either:four", {"either": "four"}), ("texts:[1,true,x]", {"texts": ["1", "true", "x"]}),
        ("deep:{code:007}", {"deep": {"code": "007"}}), ("maybe:{code:1}", {"maybe": {"code": "1"}}), ("maybe:None", {"maybe": None}),
        ("other:1", {"other": 1}),
    ],
)  # fmt: skip
def test_bare_values_have_the_types_of_the_schema(text: str, arguments: dict[str, Any]) -> None:
    call = parse(f"call:f{{{text}}}".split(Q), {"f": {"parameters": TYPED}})
    assert call is not None
    assert json.loads(call.arguments) == arguments
    assert list(map(type, json.loads(call.arguments).values())) == list(map(type, arguments.values()))


@table(
    "text",
    [
        "{" * 5000,
        "a:" + "[" * 5000,
        "a:" + "{b:" * 5000 + "1" + "}" * 5000,
        "a:1,",
        ",a:1",
        "a",
        "a:1 b:2",
        "a:[1 2]",
        "flag:x",
    ],
)
def test_arguments_of_another_form(text: str) -> None:
    assert parse(f"call:f{{{text}}}".split(Q), {"f": {"parameters": TYPED}}) is None


def test_name_with_marks() -> None:
    assert read("call:a.b-c{x:1}") == ("a.b-c", {"x": 1})


def pieces(text: str) -> list[str | int]:
    """A call's texts and tags."""
    parts: list[str | int] = [BEGIN]
    for part in text.split(Q):
        parts += [part, SEPARATOR]
    return [*parts[:-1], END]


CITY = {"type": "string", "enum": ["Bern", "Oslo"]}
TRIP: dict[str, Any] = {
    "type": "object",
    "properties": {
        "to": {"$ref": "#/$defs/city"},
        "Days": {"type": "integer", "minimum": 1, "maximum": 9},
        "via": {"type": "array", "items": {"$ref": "#/$defs/city"}, "maxItems": 2},
        "more": {"type": "object"},
        "note": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 3}]},
        "fixed": {"const": {"b": [1, "x"], "A": None}},
    },
    "required": ["to", "Days"],
    "additionalProperties": False,
    "$defs": {"city": CITY},
}


@table(
    ("text", "is_allowed"),
    [
        (f"call:go{{Days:3,to:{Q}Bern{Q}}}", True),
        (f"call:go{{Days:3,note:null,to:{Q}Bern{Q},via:[]}}", True),
        (f"call:go{{Days:3,note:{Q}a,b{Q},to:{Q}Bern{Q},via:[{Q}Oslo{Q},{Q}Bern{Q}]}}", True),
        (f'call:go{{Days:3,fixed:{{A:null,b:[1,{Q}x{Q}]}},more:{{a:1,b:{{c:[true,{Q}"{Q}]}}}},to:{Q}Bern{Q}}}', True),
        (f"call:go{{Days:3,more:{{}},to:{Q}Oslo{Q}}}", True),
        (f"call:go{{to:{Q}Bern{Q},Days:3}}", False),
        (f"call:go{{Days:30,to:{Q}Bern{Q}}}", False),
        (f"call:go{{Days:3,to:{Q}Rome{Q}}}", False),
        (f"call:go{{Days:3,note:{Q}long{Q},to:{Q}Bern{Q}}}", False),
        (f"call:go{{Days:3,to:{Q}Bern{Q},via:[{Q}Oslo{Q},{Q}Bern{Q},{Q}Bern{Q}]}}", False),
        ("call:go{Days:3,to:Bern}", False),
        ("call:go{Days:3}", False),
        (f"call:go{{Days:3,to:{Q}Bern{Q},other:1}}", False),
    ],
)
def test_grammar(text: str, is_allowed: bool) -> None:  # F13
    assert allows(grammar("gemma4", {"go": TRIP}), *pieces(text)) == is_allowed


def test_calls_follow_each_other_directly() -> None:
    held = grammar("gemma4", {"go": TRIP})
    call = pieces(f"call:go{{Days:3,to:{Q}Bern{Q}}}")
    assert allows(held, *call, *call)
    assert not allows(held, *call, "\n", *call)


def test_many_optional_parameters_make_a_small_grammar() -> None:
    schema = {"type": "object", "properties": {f"p{number:02}": {"type": "integer"} for number in range(60)}}
    held = grammar("gemma4", {"go": {**schema, "additionalProperties": False}})
    assert allows(held, *pieces("call:go{p00:1,p17:2,p59:3}"))
    assert allows(held, *pieces("call:go{}"))
    assert not allows(held, *pieces("call:go{p17:2,p00:1}"))


def test_recursive_schema() -> None:
    tree = {"type": "object", "properties": {"to": {"$ref": "#"}}, "additionalProperties": False}
    assert allows(grammar("gemma4", {"go": tree}), *pieces("call:go{to:{to:{to:{}}}}"))


def test_what_the_grammar_cannot_enforce_is_refused_or_dropped() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "string", "pattern": "x+"}}}}
    assert allows(grammar("gemma4", {"go": schema}), *pieces(f"call:go{{a:[{Q}y{Q}]}}"))
    with pytest.raises(UnsupportedParameter, match=r"tools\.go\.properties\.a\.items\.pattern"):
        grammar("gemma4", {"go": schema}, strict=True)
    with pytest.raises(InvalidValue, match="name"):
        grammar("gemma4", {"go": {"type": "object", "properties": {"a:b": {"type": "string"}}}})

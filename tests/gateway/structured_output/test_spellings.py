"""What other servers call a constraint is served, or refused with this API's spelling; never ignored. F13"""

import json
from collections.abc import Callable
from typing import Any, Final

import pytest
from tables import table

from saccade.errors import RequestError
from saccade.gateway.apis.chat.reader import parse_chat
from saccade.gateway.apis.completions.reader import parse_completion
from saccade.gateway.apis.messages.reader import parse_count, parse_messages
from saccade.gateway.apis.responses.conversation import read_conversation
from saccade.gateway.apis.responses.reader import parse_response
from saccade.gateway.chat_request import ChatRequest
from saccade.gateway.structured_output.constraint import ANY_OBJECT, Constraint, read_constraint

Fields = dict[str, Any]
SCHEMA: Final = {"type": "object", "properties": {"n": {"const": 42}}, "required": ["n"]}
TEXT: Final = json.dumps(SCHEMA)
NAMED: Final = {"name": "a", "schema": SCHEMA, "strict": True}
GRAMMAR: Final = 'root ::= "yes"'
TURNS: Final = {"messages": [{"role": "user", "content": "hi"}]}
FORM: Final = "response_format"


def of_chat(fields: Fields) -> ChatRequest:
    return parse_chat(json.dumps({**TURNS, **fields}).encode())[0]


def of_completion(fields: Fields) -> ChatRequest:
    return parse_completion(json.dumps({"prompt": "hi", **fields}).encode())[0].request


def of_response(fields: Fields) -> ChatRequest:
    request, warning = parse_response(json.dumps({"input": "hi", **fields}).encode())
    assert warning == ""
    return read_conversation(request).chat


def of_message(fields: Fields) -> ChatRequest:
    request, warning, _ = parse_messages(json.dumps({**TURNS, "max_tokens": 9, **fields}).encode())
    assert warning == ""
    return request


def of_count(fields: Fields) -> ChatRequest:
    return parse_count(json.dumps({**TURNS, **fields}).encode())[0]


def form(**fields: Any) -> Fields:
    return {FORM: fields}


def output(**fields: Any) -> Fields:
    return {"text": {"format": fields}}


def schema(param: str, text: str = TEXT, strict: bool = False) -> Constraint:
    return Constraint("json_schema", text, param, strict)


@table(
    "fields, expected",
    [
        (form(type="json_object", schema=SCHEMA), schema("response_format.schema")),
        (form(type="json_object", schema=TEXT), schema("response_format.schema")),
        (form(type="json_object", schema=None), schema(FORM, ANY_OBJECT)),
        (form(type="json_object", json_schema=NAMED), schema("response_format.json_schema.schema", strict=True)),
        (form(type="json_schema", schema=SCHEMA), schema("response_format.schema")),
        (form(type="json_schema", schema=SCHEMA, strict=True), schema("response_format.schema", strict=True)),
        (form(type="json_schema", schema=NAMED), schema("response_format.schema.schema", strict=True)),
        (form(type="json_schema", json_schema={"schema": TEXT}), schema("response_format.json_schema.schema")),
        (form(type="json_schema", value=NAMED), schema("response_format.value.schema", strict=True)),
        (form(type="json", value=SCHEMA), schema("response_format.value")),
        (form(type="json", value=TEXT), schema("response_format.value")),
        (form(type="json_object", value=SCHEMA), schema("response_format.value")),
        (form(type="regex", value="[0-9]{3}"), Constraint("regex", "[0-9]{3}", "response_format.value")),
        (form(type="text", schema=None, json_schema=None), None),
        ({"json_schema": SCHEMA}, schema("json_schema")),
        ({"json_schema": TEXT}, schema("json_schema")),
        ({"json_schema": NAMED}, schema("json_schema.schema", strict=True)),
        ({"json_schema": json.dumps(NAMED)}, schema("json_schema.schema", strict=True)),
        ({"regex": "[0-9]{3}"}, Constraint("regex", "[0-9]{3}", "regex")),
        ({"ebnf": GRAMMAR}, Constraint("grammar", GRAMMAR, "ebnf")),
        ({"grammar": GRAMMAR}, Constraint("grammar", GRAMMAR, "grammar")),
        ({"grammar": "", "regex": "", "ebnf": None, "json_schema": "", "structural_tag": ""}, None),
    ],
)
def test_chats_and_completions_hold_their_answers_to_it(fields: Fields, expected: Constraint | None) -> None:
    assert read_constraint(of_chat(fields)) == expected
    assert read_constraint(of_completion(fields)) == expected


HELD: Final = schema("response_format.json_schema.schema", json.dumps(SCHEMA))
STRICT: Final = schema("response_format.json_schema.schema", json.dumps(SCHEMA), strict=True)


@table(
    "read, fields, expected",
    [
        (of_response, output(type="json_object", schema=SCHEMA), HELD),
        (of_response, output(type="json_object", schema=SCHEMA, strict=True), STRICT),
        (of_response, output(type="json_object", schema=TEXT), HELD),
        (of_response, output(type="json_schema", schema=TEXT), HELD),
        (of_response, output(type="json_object", schema=None), schema(FORM, ANY_OBJECT)),
        (of_response, {"response_format": {"type": "text"}, "regex": "", "guided_json": None}, None),
        (of_message, {"output_format": {"type": "json_schema", "schema": SCHEMA}}, STRICT),
        (of_message, {"output_config": {"format": {"type": "json_schema", "schema": TEXT}}}, STRICT),
        (of_message, {"response_format": {"type": "text"}, "regex": "", "guided_json": None}, None),
        (of_count, {"output_format": {"type": "json_schema", "schema": SCHEMA}}, STRICT),
    ],
)
def test_other_apis_hold_their_answers_to_it(
    read: Callable[[Fields], ChatRequest], fields: Fields, expected: Constraint | None
) -> None:
    assert read_constraint(read(fields)) == expected


REFUSED: Final = [
    *(
        (read, fields, param, hint)
        for read in (of_chat, of_completion)
        for fields, param, hint in (
            (form(type="json_schema"), "response_format.json_schema", "json_schema"),
            (form(type="json_schema", json_schema=SCHEMA), "response_format.json_schema.schema", '"json_schema": {'),
            (form(type="json"), "response_format.json_schema", "json_schema"),
            (form(type="text", schema=SCHEMA), "response_format.schema", "json_schema"),
            (form(type="text", json_schema=NAMED), "response_format.json_schema.schema", "json_schema"),
            (form(type="regex"), "response_format.value", "`response_format.value`"),
            (form(type="regex", value=7), "response_format.value", "`response_format.value`"),
            (form(type="regex", value=""), "response_format.value", "`response_format.value`"),
            (form(type="structural_tag", structures=[]), "response_format.type", "json_schema"),
            (form(type="grammar", grammar=GRAMMAR), "response_format.type", "json_schema"),
            ({"structural_tag": "{}"}, "structural_tag", "`response_format`"),
            ({"guided_json_object": True}, "guided_json_object", "`response_format`"),
            ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "leave it out"),
            (form(type="json_schema", schema=SCHEMA, json_schema=NAMED), "response_format.schema", "send one"),
            (form(type="json_object", schema=SCHEMA) | {"regex": "a"}, "regex", "send one"),
            ({"json_schema": SCHEMA, "guided_json": SCHEMA}, "json_schema", "send one"),
            ({"grammar": GRAMMAR, "regex": "a"}, "grammar", "send one"),
            ({"ebnf": GRAMMAR, "structured_outputs": {"regex": "a"}}, "ebnf", "send one"),
        )
    ),
    *(
        (read, {name: value}, name, hint)
        for read, hint in ((of_response, "text.format"), (of_message, "output_config"), (of_count, "output_config"))
        for name, value in {
            "response_format": {"type": "json_object"},
            "structured_outputs": {"regex": "a"},
            "guided_json": SCHEMA,
            "guided_regex": "a",
            "guided_choice": ["a"],
            "guided_grammar": GRAMMAR,
            "guided_json_object": True,
            "json_schema": SCHEMA,
            "regex": "a",
            "ebnf": GRAMMAR,
            "grammar": GRAMMAR,
            "structural_tag": "{}",
            "format": SCHEMA,
        }.items()
    ),
    (of_response, output(type="json_schema"), "text.format.schema", "text.format"),
    (of_response, output(type="text", schema=SCHEMA), "text.format.schema", "text.format"),
    (of_response, output(type="json_schema", json_schema=NAMED), "text.format.json_schema", "text.format"),
    (of_response, output(type="json_object", json_schema=NAMED), "text.format.json_schema", "text.format"),
    (of_response, output(type="json_object", value=SCHEMA), "text.format.value", "text.format"),
    (of_response, output(type="regex", value="a"), "text.format.type", "text.format"),
    (of_message, {"output_config": {"format": {"type": "json_object", "schema": {}}}}, "output_config.format.type", "json_schema"),
    (of_message, {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema", "is missing"),
    (
        of_message,
        {"output_format": {"type": "json_schema", "schema": {}}, "output_config": {"format": {"type": "json_schema", "schema": {}}}},
        "output_format",
        "send one",
    ),
]  # fmt: skip


@table("read, fields, param, hint", REFUSED)
def test_else_it_is_refused_with_our_spelling(
    read: Callable[[Fields], ChatRequest], fields: Fields, param: str, hint: str
) -> None:
    with pytest.raises(RequestError) as error:
        read_constraint(read(fields))
    assert error.value.param == param
    assert hint in error.value.message


@table("name", ["max_new_tokens", "repeat_penalty"])
def test_what_breaks_no_answer_is_ignored_with_a_warning(name: str) -> None:
    _, warning = parse_chat(json.dumps({**TURNS, name: 1}).encode())
    assert name in warning

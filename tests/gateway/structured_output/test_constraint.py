"""What requests hold their answers to, by the names of OpenAI and of vLLM."""

import json
from typing import Any

import msgspec
import pytest
from tables import table

from saccade.errors import InvalidValue, UnsupportedParameter
from saccade.gateway.apis.chat.reader import parse_chat
from saccade.gateway.chat_request import ChatRequest
from saccade.gateway.structured_output.constraint import ANY_OBJECT, Constraint, read_constraint, without_constraint

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA)


def parsed(**fields: Any) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], **fields}
    return parse_chat(json.dumps(body).encode())[0]


@table(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"guided_json": None, "structured_outputs": {"json": None, "choice": None}}, None),
        ({"response_format": {"type": "json_object"}}, Constraint("json_schema", ANY_OBJECT, "response_format")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            Constraint("json_schema", TEXT, "response_format.json_schema.schema"),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}}},
            Constraint("json_schema", TEXT, "response_format.json_schema.schema", strict=True),
        ),
        ({"guided_json": SCHEMA}, Constraint("json_schema", TEXT, "guided_json")),
        ({"guided_json": TEXT}, Constraint("json_schema", TEXT, "guided_json")),
        ({"guided_regex": "a+"}, Constraint("regex", "a+", "guided_regex")),
        ({"guided_choice": ["a.b", "c", "c"]}, Constraint("regex", r"a\.b|c", "guided_choice")),
        ({"guided_grammar": "start: A"}, Constraint("grammar", "start: A", "guided_grammar")),
        ({"structured_outputs": {"json": SCHEMA}}, Constraint("json_schema", TEXT, "structured_outputs.json")),
        ({"structured_outputs": {"regex": "a"}}, Constraint("regex", "a", "structured_outputs.regex")),
        ({"structured_outputs": {"choice": ["a"]}}, Constraint("regex", "a", "structured_outputs.choice")),
        ({"structured_outputs": {"grammar": "g"}}, Constraint("grammar", "g", "structured_outputs.grammar")),
        (
            {"structured_outputs": {"json_object": True}},
            Constraint("json_schema", ANY_OBJECT, "structured_outputs.json_object"),
        ),
    ],
)
def test_constraint_of_each_parameter(fields: dict[str, Any], expected: Constraint | None) -> None:  # F13
    assert read_constraint(parsed(**fields)) == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
    ],
)
def test_several_or_incomplete_constraints_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidValue) as error:
        read_constraint(parsed(**fields))
    assert error.value.param == param


@table(
    "fields",
    [
        {"response_format": {"type": "grammar"}},
        {"response_format": "json"},
        {"guided_choice": []},
        {"guided_choice": [""]},
        {"guided_regex": "a" * 70_000},
        {"structured_outputs": {"structural_tag": "{}"}},
    ],
)
def test_other_values_are_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises((InvalidValue, UnsupportedParameter)) as error:
        read_constraint(parsed(**fields))
    assert (error.value.param or "").startswith(next(iter(fields)))


def test_nothing_of_the_body_is_kept() -> None:
    """Raw values refer to the whole body, with its images."""
    request = without_constraint(parsed(response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}}))
    request = msgspec.structs.replace(request, messages=[])
    assert not any(isinstance(value, msgspec.Raw) for value in msgspec.structs.asdict(request).values())
    assert read_constraint(request) is None

"""What holds an answer whose request has tools, a schema, or both. F13"""

from typing import Any

import msgspec
import pytest

from saccade.errors import InvalidValue
from saccade.gateway.chat_request import ChatRequest
from saccade.gateway.structured_output.constraint import Constraint, with_calls
from saccade.models.tool_formats import kimi_k3
from saccade.models.tool_formats.form import CallConstraint, ContentConstraint, ToolCallTokens

TOKENS = ToolCallTokens("hermes", 1, 2)
SCHEMA = Constraint("json_schema", '{"type":"object"}', "response_format.json_schema.schema", strict=True)
CHOICE = Constraint("regex", "a|b", "guided_choice")
NAMED = {"type": "function", "function": {"name": "f"}}


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


def held(
    constraint: Constraint | None, *tools: Any, tokens: ToolCallTokens = TOKENS, **fields: Any
) -> Constraint | None:
    request = ChatRequest(model="m", messages=[], tools=list(tools), **fields)
    return with_calls(constraint, request, tools, tokens)


def calls(constraint: Constraint | None) -> CallConstraint:
    assert constraint is not None
    assert constraint.kind == "tool_calls"
    return msgspec.json.decode(constraint.text, type=CallConstraint)


def test_tools_without_a_constraint() -> None:
    assert held(None, tool()) is None
    assert held(SCHEMA) == SCHEMA
    assert held(CHOICE, tool()) == CHOICE


@pytest.mark.parametrize("strict", [True, False])
def test_schema_with_tools_allows_json_or_calls(strict: bool) -> None:
    found = calls(held(SCHEMA, tool(strict=strict)))
    assert found.content == ContentConstraint(SCHEMA.text, SCHEMA.param, strict=True)
    assert (found.must_call, found.functions[0].strict) == (False, strict)


def test_a_form_with_tags_around_content_encloses_json_without_tools() -> None:
    whole = held(SCHEMA, tokens=kimi_k3.TOKENS)
    found = calls(whole)
    assert (found.functions, found.content) == ([], ContentConstraint(SCHEMA.text, SCHEMA.param, strict=True))
    assert whole is not None
    assert whole.param == SCHEMA.param
    assert held(CHOICE, tokens=kimi_k3.TOKENS) == CHOICE


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_schema_has_no_effect_with_required_calls(choice: Any) -> None:
    found = calls(held(SCHEMA, tool(), tool_choice=choice))
    assert (found.must_call, found.content) == (True, None)


@pytest.mark.parametrize(
    ("fields", "function", "param"),
    [
        ({"tool_choice": "required"}, {}, "tool_choice"),
        ({"tool_choice": NAMED}, {}, "tool_choice"),
        ({}, {"strict": True}, "tools"),
    ],
)
def test_other_grammars_hold_alone(fields: dict[str, Any], function: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidValue, match=r"`guided_choice` cannot both constrain") as raised:
        held(CHOICE, tool(**function), **fields)
    assert raised.value.param == param

"""Calls of tools that an answer is held to: those of `tool_choice`, of `strict` functions, and beside a schema."""

from collections.abc import Sequence

import msgspec

from saccade.errors import InvalidValue
from saccade.gateway.chat import ChatRequest
from saccade.gateway.prompt.tools import read_choice
from saccade.gateway.structured_output.constraint import Constraint
from saccade.grammars.tool_calls import HeldCalls, HeldContent, HeldFunction, ToolCallTokens
from saccade.tokenization.chat_template import Tool

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
"""What a function without `parameters` takes, as OpenAI has it."""


def with_held_calls(
    constraint: Constraint | None, request: ChatRequest, tools: Sequence[Tool], tokens: ToolCallTokens | None
) -> Constraint | None:
    """Return what the answer is held to: *constraint*, or calls of *tools*, or either of them, or nothing.

    Raises InvalidValue where calls and a *constraint* that is no JSON would both hold the answer.
    """
    choice = read_choice(request)
    is_strict = any(tool["function"].get("strict") for tool in tools)
    is_json = constraint is not None and constraint.kind == "json_schema"
    if tokens is None or not tools or not (choice.must_call or is_strict or is_json):
        return constraint
    param = "tool_choice" if choice.must_call else "tools"
    if constraint is not None and not is_json:
        other = constraint.param.split(".")[0]
        raise InvalidValue(f"`{param}` and `{other}` cannot both hold the answer; send one of them.", param)
    # An answer that must call has no content to be held.
    content = None
    if constraint is not None and not choice.must_call:
        content = HeldContent(constraint.text, constraint.param, constraint.strict)
    functions = [
        _held(tool, f"tools[{position}].function.parameters")
        for position, tool in enumerate(tools)
        if choice.name in (None, tool["function"]["name"])
    ]
    held = HeldCalls(
        functions,
        tokens,
        must_call=choice.must_call,
        many=request.parallel_tool_calls is not False and choice.name is None,
        content=content,
    )
    return Constraint("tool_calls", msgspec.json.encode(held).decode(), param)


def _held(tool: Tool, place: str) -> HeldFunction:
    function = tool["function"]
    parameters = function.get("parameters")
    schema = NO_PARAMETERS if parameters is None else {"type": "object", **parameters}
    return HeldFunction(function["name"], schema, place, bool(function.get("strict")))

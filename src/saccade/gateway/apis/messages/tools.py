"""Translates a request's tools and tool choice into a chat's.

Anthropic's own tools are left out. Requests give only the types of these tools: Anthropic's servers run some of them,
and Anthropic's models know the schemas of the others. No model here knows these schemas.
"""

from typing import Any

from saccade.errors import InvalidValue, UnsupportedParameter
from saccade.gateway.apis.messages.wire import CountRequest, Tool
from saccade.gateway.parameters import printable


def own_tools(request: CountRequest) -> list[str]:
    """Return the types of Anthropic's own tools in *request*; they are left out."""
    return [printable(tool.type) for tool in request.tools or () if _is_own(tool) and tool.type is not None]


def tool_fields(request: CountRequest, names: dict[str, str]) -> dict[str, Any]:
    """Return the chat's fields for the tools and tool choice of *request*. Note the client's names for them in *names*.

    Raises InvalidValue, and UnsupportedParameter if the choice needs a tool that is left out.
    """
    return _tools(request, names) | _tool_choice(request)


def _is_own(tool: Tool) -> bool:
    return tool.type not in (None, "custom")


def _tools(request: CountRequest, names: dict[str, str]) -> dict[str, Any]:
    if request.tools is None:
        return {}
    tools: list[dict[str, Any]] = []
    for position, tool in enumerate(request.tools):
        if not _is_own(tool):
            names[f"tools[{len(tools)}].function"] = f"tools[{position}]"
            names[f"tools[{len(tools)}].function.parameters"] = f"tools[{position}].input_schema"
            tools.append(_function(tool, f"tools[{position}]"))
    return {"tools": tools}


def _function(tool: Tool, field: str) -> dict[str, Any]:
    for name in ("name", "input_schema"):
        if getattr(tool, name) is None:
            raise InvalidValue(f"`{field}.{name}` is missing.", f"{field}.{name}")
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_choice(request: CountRequest) -> dict[str, Any]:
    choice = request.tool_choice
    if choice is None:
        return {}
    fields: dict[str, Any] = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    match choice.type:
        case "auto" | "none":
            return {**fields, "tool_choice": choice.type}
        case "any" if request.tools and all(map(_is_own, request.tools)):
            raise _left_out("tool_choice.type", "asks for a call, but all tools have")
        case "any":
            return {**fields, "tool_choice": "required"}
        case "tool" if any(tool.name == choice.name and _is_own(tool) for tool in request.tools or ()):
            raise _left_out("tool_choice.name", "names a tool that has")
        case "tool" if choice.name is not None:
            return {**fields, "tool_choice": {"type": "function", "function": {"name": choice.name}}}
        case "tool":
            raise InvalidValue("`tool_choice.name` is missing.", "tool_choice.name")
    raise InvalidValue("`tool_choice.type` must be auto, any, tool or none.", "tool_choice.type")


def _left_out(field: str, fault: str) -> UnsupportedParameter:
    return UnsupportedParameter(
        f"`{field}` {fault} a type of Anthropic's own, which this model cannot call; declare it by `name` and "
        "`input_schema`, without `type`.",
        field,
    )

"""A request's tools: their declarations, the choice among them, and the calls in earlier turns."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from saccade.errors import InvalidValue, UnsupportedParameter
from saccade.gateway.chat_request import ChatMessage, ChatRequest, TokenizeRequest, ToolCall
from saccade.gateway.field_schemas import MAX_TOOL_NAME, TOOL_NAME
from saccade.gateway.prompt.media_options import excerpt
from saccade.tokenization.chat_template import ChatTemplate
from saccade.tokenization.messages import Message, Tool

MAX_DEPTH: Final = 64
"""Depth of nested values in a declaration, and in the arguments of a call."""

_NAME: Final = re.compile(TOOL_NAME)


@dataclass(frozen=True)
class CallRule:
    """Says whether an answer may or must call tools; by default it may.

    If *name* is set, the answer may call only that function. The prompt declares only the *allowed* tools, or all tools
    if *allowed* is None.
    """

    no_tools: bool = False
    must_call: bool = False
    name: str | None = None
    allowed: tuple[str, ...] | None = None


def read_tools(request: ChatRequest | TokenizeRequest) -> tuple[Tool, ...]:
    """Return the tools that the prompt declares; none with `tool_choice: "none"`.

    Raises InvalidValue for a wrong declaration, and UnsupportedParameter for an unsupported one.
    """
    tools = tuple(_read_tool(tool, f"tools[{position}]") for position, tool in enumerate(request.tools or ()))
    names: set[str] = set()
    for position, tool in enumerate(tools):
        if (name := tool["function"]["name"]) in names:
            raise InvalidValue(f"`tools[{position}].function.name`: {name!r} is there twice.", "tools")
        names.add(name)
    choice = read_choice(request)
    if choice.must_call and not tools:
        raise InvalidValue("`tool_choice` asks for a call, but `tools` is empty.", "tool_choice")
    if choice.name is not None and choice.name not in names:
        raise InvalidValue(f"`tool_choice.function.name`: {choice.name!r} is none of `tools`.", "tool_choice")
    if choice.allowed is not None:
        check_allowed(choice.allowed, names, "tool_choice.allowed_tools.tools")
        tools = tuple(tool for tool in tools if tool["function"]["name"] in choice.allowed)
        if choice.must_call and not tools:
            raise InvalidValue("`tool_choice.allowed_tools.tools` names none of `tools`.", "tool_choice")
    return () if choice.no_tools else tools


def read_choice(request: ChatRequest | TokenizeRequest) -> CallRule:
    """Return the parsed `tool_choice`. Raises InvalidValue."""
    match request.tool_choice if isinstance(request, ChatRequest) else None:
        case None | "auto":
            return CallRule()
        case "none":
            return CallRule(no_tools=True)
        case "required":
            return CallRule(must_call=True)
        case {"type": "function", "function": {"name": str(name)}}:
            return CallRule(must_call=True, name=name)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*tools]}}:
            return CallRule(must_call=mode == "required", allowed=tuple(map(_allowed_name, tools)))
    raise InvalidValue(
        '`tool_choice` must be "auto", "none", "required", {"type": "function", "function": {"name": ...}} or {"type": '
        '"allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}.',
        "tool_choice",
    )


def check_allowed(allowed: Sequence[str], names: Collection[str], field: str) -> None:
    """Raise InvalidValue if one of the *allowed* tools, which *field* lists, is not in *names*."""
    for position, name in enumerate(allowed):
        if name not in names:
            place = f"{field}[{position}]"
            raise InvalidValue(f"`{place}`: {excerpt(name)!r} is none of `tools`.", place)


def _allowed_name(tool: object) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise InvalidValue(
        '`tool_choice.allowed_tools.tools` must have items such as {"type": "function", "function": {"name": ...}}.',
        "tool_choice",
    )


def _read_tool(tool: Mapping[str, Any], field: str) -> Tool:
    if tool.get("type") != "function":
        raise UnsupportedParameter(f'`{field}.type`: only tools of the type "function" are served.', f"{field}.type")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidValue(f"`{field}.function` must be an object.", f"{field}.function")
    field = f"{field}.function"
    name, description = function.get("name"), function.get("description")
    parameters, strict = function.get("parameters"), function.get("strict")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidValue(
            f"`{field}.name` must be a text of 1 to {MAX_TOOL_NAME} letters, digits, `_`, `-` and `.`.", f"{field}.name"
        )
    if not isinstance(description, str | None):
        raise InvalidValue(f"`{field}.description` must be a text.", f"{field}.description")
    if not isinstance(parameters, dict | None) or (parameters or {}).get("type", "object") != "object":
        raise InvalidValue(f"`{field}.parameters` must be a JSON schema of the type `object`.", f"{field}.parameters")
    if not isinstance(strict, bool | None):
        raise InvalidValue(f"`{field}.strict` must be true or false.", f"{field}.strict")
    _check_depth(tool, field)
    return tool


def read_calls(message: ChatMessage, field: str) -> list[dict[str, Any]]:
    """Return the calls of an earlier turn for the template, with parsed arguments. Raises InvalidValue.

    A model may have written arguments that are not a JSON object; these stay text.
    """
    if not message.tool_calls:
        return []
    if message.role != "assistant":
        raise InvalidValue(
            f"`{field}.tool_calls`: only messages of the role assistant call tools; leave it out here.",
            f"{field}.tool_calls",
        )
    return [_read_call(call, f"{field}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls)]


def _read_call(call: ToolCall, field: str) -> dict[str, Any]:
    if call.type != "function":
        raise UnsupportedParameter(f'`{field}.type`: only calls of the type "function" are served.', f"{field}.type")
    name = f"{field}.function.arguments"
    try:
        arguments = msgspec.json.decode(call.function.arguments) if call.function.arguments.strip() else {}
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        arguments = None
    if isinstance(arguments, dict):
        _check_depth(arguments, name)
    else:
        arguments = call.function.arguments
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }


def check_served(tools: Sequence[Tool], reads_calls: bool, takes_tools: bool) -> None:
    """Raise UnsupportedParameter if the model's template ignores *tools*, or if the model's calls cannot be parsed."""
    if tools and not takes_tools:
        raise UnsupportedParameter("This model's chat template does not write `tools`; leave them out.", "tools")
    if tools and not reads_calls:
        raise UnsupportedParameter(
            "`tools`: no form of tool calls is declared for this model, or its vocabulary lacks the form's tags; leave "
            "them out, or choose a form with --tool-call-parser.",
            "tools",
        )


def check_history(messages: Sequence[Message], template: ChatTemplate) -> None:
    """Raise UnsupportedParameter if *template* ignores the calls or results in earlier turns."""
    for position, message in enumerate(messages):
        field = f"messages[{position}]"
        if template.loses_calls and "tool_calls" in message:
            raise UnsupportedParameter(
                f"`{field}.tool_calls`: this model's chat template does not write calls of tools; leave them out, or "
                "write them in `content`.",
                f"{field}.tool_calls",
            )
        if template.loses_results and message["role"] == "tool":
            raise UnsupportedParameter(
                f"`{field}.role`: this model's chat template does not write results of tools; send them in messages "
                "of the role user.",
                f"{field}.role",
            )


def place_result_images(messages: list[Message], template: ChatTemplate) -> list[Message]:
    """Return *messages* with the media of tool results moved to where *template* writes them, in the same order.

    If the template drops media in results, they move to the user's turn that follows directly, or to a new one.
    """
    results = [message["content"] for message in messages if message["role"] == "tool"]
    has_media = any(part["type"] != "text" for parts in results if not isinstance(parts, str) for part in parts)
    if not has_media or not template.loses_result_images:
        return messages
    turns: list[Message] = []
    pending: list[Mapping[str, str]] = []
    for message in messages:
        content = message["content"]
        if message["role"] == "tool":
            if not isinstance(content, str):
                pending += [part for part in content if part["type"] != "text"]
                message = {**message, "content": "\n".join(part["text"] for part in content if part["type"] == "text")}
        elif pending and message["role"] == "user":
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            message, pending = {**message, "content": [*pending, *parts]}, []
        elif pending:
            turns.append({"role": "user", "content": pending})
            pending = []
        turns.append(message)
    return [*turns, {"role": "user", "content": pending}] if pending else turns


def texts_in(value: Any) -> list[str]:
    """Return all strings in the JSON *value*, keys included, outer levels first."""
    texts: list[str] = []
    level = [value]
    while level:
        texts += [part for part in level if isinstance(part, str)]
        dicts = [part for part in level if isinstance(part, dict)]
        inside = [*map(dict.values, dicts), *(part for part in level if isinstance(part, list | tuple))]
        texts += [key for part in dicts for key in part]
        level = [part for parts in inside for part in parts if isinstance(part, str | dict | list | tuple)]
    return texts


def _check_depth(value: Any, field: str) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise InvalidValue(f"`{field}` is nested too deeply; {MAX_DEPTH} levels are served.", field)
        inside = (part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list))
        level = [part for parts in inside for part in parts if isinstance(part, dict | list)]

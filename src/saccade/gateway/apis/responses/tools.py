"""Translates the tools of Responses into a chat's functions, and calls of those functions into the client's items.

A tool in a namespace becomes the function `NAMESPACE__NAME`. A custom tool becomes a function with one text argument,
and the local shell becomes one with a command. Tools that only a server can run are left out. Source: the types in
OpenAI's SDK.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, Struct

from saccade.errors import InvalidValue, UnsupportedParameter
from saccade.gateway.apis.responses.wire import (
    CustomToolCallItem,
    FunctionCallItem,
    LocalShellAction,
    LocalShellCallItem,
    Status,
)
from saccade.gateway.json_body import decode
from saccade.gateway.output.call_reader import GeneratedCall
from saccade.gateway.prompt.media_options import excerpt
from saccade.models.tool_formats.json_pieces import CHARACTERS

Tool = Mapping[str, Any]
"""A tool in the client's form."""

LOCAL_SHELL: Final = "local_shell"
CUSTOM_PARAMETERS: Final = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
LOCAL_SHELL_PARAMETERS: Final = {
    "command": {"type": "array", "items": {"type": "string"}, "description": "the program and its arguments"},
    "working_directory": {"type": "string"},
    "timeout_ms": {"type": "integer"},
    "env": {"type": "object", "additionalProperties": {"type": "string"}, "description": "further variables"},
    "user": {"type": "string", "description": "who runs it"},
}
LOCAL_SHELL_FUNCTION: Final = {
    "name": LOCAL_SHELL,
    "description": "Runs a command on the user's machine and returns its output.",
    "parameters": {
        "type": "object",
        "properties": LOCAL_SHELL_PARAMETERS,
        "required": ["command"],
        "additionalProperties": False,
    },
}

BEFORE_INPUT: Final = '{"input": "'
"""The beginning of a custom tool's arguments."""


CallItem = FunctionCallItem | CustomToolCallItem | LocalShellCallItem


class ShellArguments(Struct, frozen=True, omit_defaults=True):
    """The arguments of LOCAL_SHELL_FUNCTION."""

    command: list[str]
    working_directory: str | None = None
    timeout_ms: int | None = None
    env: dict[str, str] = {}
    user: str | None = None


_SHELL_ARGUMENTS: Final = msgspec.json.Decoder(ShellArguments)


@dataclass(frozen=True)
class DeclaredTool:
    """A *function* that the chat declares in place of a client's tool; the client sent the tool in *field*."""

    function: Mapping[str, Any]
    field: str
    type: Literal["function", "custom", "local_shell"]
    name: str
    namespace: str | None = None

    def call_item(self, call: GeneratedCall, suffix: str) -> CallItem:
        """Return *call*, which calls the function, as an item for the client; the item's id ends in *suffix*."""
        namespace = UNSET if self.namespace is None else self.namespace
        status: Status = "incomplete" if call.is_cut else "completed"
        match self.type:
            case "function":
                return FunctionCallItem(f"fc_{suffix}", call.id, self.name, call.arguments, status, namespace)
            case "custom":
                text = CustomInput().push_arguments(call.arguments) if call.is_cut else _custom_input(call.arguments)
                return CustomToolCallItem(f"ctc_{suffix}", call.id, self.name, text, status, namespace)
        # Half a command is none: a client that overlooks the status must not run it.
        action = LocalShellAction([]) if call.is_cut else _shell_action(call.arguments)
        return LocalShellCallItem(f"lsh_{suffix}", call.id, action, status)


@dataclass(frozen=True)
class DeclaredTools:
    """The tools of a chat, and the types of the tools that are *left_out* because a server would run them.

    *empty_namespaces* holds the names of the namespaces without tools.
    """

    tools: tuple[DeclaredTool, ...] = ()
    left_out: tuple[str, ...] = ()
    empty_namespaces: tuple[str, ...] = ()

    @cached_property
    def _by_name(self) -> Mapping[tuple[str, str | None], DeclaredTool]:
        return {(tool.name, tool.namespace): tool for tool in reversed(self.tools)}

    @cached_property
    def _by_function(self) -> Mapping[str, DeclaredTool]:
        return {tool.function["name"]: tool for tool in reversed(self.tools)}

    def function_name(self, name: str, namespace: str | None) -> str:
        """Return the name of the function for the client's tool *name* in *namespace*, even if it is not declared."""
        tool = self._by_name.get((name, namespace))
        if tool is not None:
            return str(tool.function["name"])
        return name if namespace is None else _flat_name(namespace, name)

    def call_item(self, call: GeneratedCall, suffix: str) -> CallItem:
        """Return *call* as an item for the client; the item's id ends in *suffix*."""
        undeclared = DeclaredTool({}, "", "function", call.name)
        return self._by_function.get(call.name, undeclared).call_item(call, suffix)


def declare_tools(tools: Iterable[tuple[str, Tool]]) -> DeclaredTools:
    """Return what a chat declares for *tools*, pairs of field and tool. Raises RequestError."""
    declared: list[DeclaredTool] = []
    left_out: list[str] = []
    empty: list[str] = []
    for field, tool in tools:
        match tool.get("type"):
            case "function" | "custom" | "local_shell":
                declared.append(_declared(tool, field))
            case "namespace":
                in_namespace = list(_of_namespace(tool, field))
                declared += in_namespace
                empty += [] if in_namespace else [_text(tool, "name", field)]
            case str(kind):
                left_out.append(kind)
            case _:
                raise InvalidValue(f"`{field}.type` is missing.", f"{field}.type")
    return DeclaredTools(tuple(declared), tuple(left_out), tuple(empty))


def _of_namespace(tool: Tool, field: str) -> Iterator[DeclaredTool]:
    """Yield the tools of a namespace. The first tool's description begins with the namespace's."""
    name, description, tools = _text(tool, "name", field), _description(tool, field), tool.get("tools")
    if not isinstance(tools, list) or not all(isinstance(one, dict) for one in tools):
        raise InvalidValue(f"`{field}.tools` must be an array of tools.", f"{field}.tools")
    for position, inner in enumerate(tools):
        place = f"{field}.tools[{position}]"
        if inner.get("type") not in ("function", "custom"):
            raise UnsupportedParameter(
                f'`{place}.type`: a namespace holds tools of the types "function" and "custom".', f"{place}.type"
            )
        one = _declared(inner, place)
        function = dict(one.function, name=_flat_name(name, one.name))
        if position == 0 and description:
            function["description"] = "\n\n".join(filter(None, (description, function.get("description"))))
        yield replace(one, function=function, namespace=name)


def _declared(tool: Tool, field: str) -> DeclaredTool:
    if tool["type"] == LOCAL_SHELL:
        return DeclaredTool(LOCAL_SHELL_FUNCTION, field, "local_shell", LOCAL_SHELL)
    name, description = _text(tool, "name", field), _description(tool, field)
    if tool["type"] == "custom":
        text = "\n\n".join(filter(None, (description, _grammar_text(tool, field))))
        function = {"name": name, "description": text, "parameters": CUSTOM_PARAMETERS}
        return DeclaredTool(function, field, "custom", name)
    values = {"description": description, "parameters": tool.get("parameters"), "strict": tool.get("strict")}
    function = {"name": name, **{key: value for key, value in values.items() if value is not None}}
    return DeclaredTool(function, field, "function", name)


def _grammar_text(tool: Tool, field: str) -> str:
    """Return a sentence about the grammar that a custom tool's input must follow, or "" if there is no grammar."""
    match tool.get("format"):
        case None | {"type": "text"}:
            return ""
        case {"type": "grammar", "syntax": str(syntax), "definition": str(definition)}:
            return f"The input follows this grammar ({syntax}):\n{definition}"
    raise InvalidValue(
        f'`{field}.format` must have the type "text", or "grammar" with `syntax` and `definition`.', f"{field}.format"
    )


def _description(tool: Tool, field: str) -> str | None:
    description = tool.get("description")
    if not isinstance(description, str | None):
        raise InvalidValue(f"`{field}.description` must be a text.", f"{field}.description")
    return description


def _text(tool: Tool, key: str, field: str) -> str:
    value = tool.get(key)
    if not isinstance(value, str):
        raise InvalidValue(f"`{field}.{key}` {'is missing' if value is None else 'must be a text'}.", f"{field}.{key}")
    return value


def _flat_name(namespace: str, name: str) -> str:
    return f"{namespace.removesuffix('__')}__{name}"


def choose_tools(
    choice: str | dict[str, Any] | None, declared: DeclaredTools
) -> tuple[str | dict[str, Any] | None, DeclaredTools]:
    """Return the chat's `tool_choice`, and the tools that remain available. Raises RequestError."""
    match choice:
        case None | "auto" | "none" | "required":
            return choice, declared
        case {"type": "function" | "custom"}:
            return _named(declared.function_name(*_tool_of(choice, "tool_choice"))), declared
        case {"type": "local_shell"}:
            return _named(LOCAL_SHELL), declared
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": [*allowed]}:
            names = [_tool_of(one, f"tool_choice.tools[{index}]") for index, one in enumerate(allowed)]
            left_out = [(kind, None) for kind in declared.left_out]
            known = {*((tool.name, tool.namespace) for tool in declared.tools), *left_out}
            for index, one in enumerate(names):
                if one not in known:
                    place = f"tool_choice.tools[{index}]"
                    raise InvalidValue(f"`{place}`: {excerpt(one[0])!r} is none of `tools`.", place)
            tools = tuple(tool for tool in declared.tools if (tool.name, tool.namespace) in names)
            return mode, replace(declared, tools=tools)
        case {"type": str(kind)} if kind in declared.left_out:
            raise UnsupportedParameter(
                "`tool_choice.type`: this server cannot run that tool; choose a function, or leave it out.",
                "tool_choice.type",
            )
    raise InvalidValue(
        '`tool_choice` must be "auto", "none", "required", or an object: of the type "function" or "custom" with a '
        '`name`, "local_shell", or "allowed_tools" with `mode` and `tools`.',
        "tool_choice",
    )


def _tool_of(choice: object, field: str) -> tuple[str, str | None]:
    """Return the name and the namespace of a tool in a *choice*; a tool without a name goes by its type."""
    match choice:
        case {"type": "function" | "custom", "name": str(name), **others}:
            namespace = others.get("namespace")
            if isinstance(namespace, str | None):
                return name, namespace
        case {"type": str(kind)} if kind not in ("function", "custom"):
            return kind, None
    raise InvalidValue(
        f'`{field}` must be a tool, {{"type": "function", "name": ...}}; one in a namespace has a `namespace`, too.',
        field,
    )


def _named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def custom_arguments(text: str) -> str:
    """Return the input *text* as the arguments of the function that stands for a custom tool."""
    return msgspec.json.encode({"input": text}).decode()


def _custom_input(arguments: str) -> str:
    """Return the input of a custom tool. A model may write the bare input, without the JSON object around it."""
    match _decoded(arguments):
        case {"input": str(text)}:
            return text
        case str(text):
            return text
    return arguments


class CustomInput:
    """Extracts a custom tool's input from the growing arguments of its function."""

    def __init__(self) -> None:
        self._text = ""
        self._has_begun = self._has_ended = False

    def push_arguments(self, arguments: str) -> str:
        """Take more of the arguments and return more of the input. No escape may be split between two calls."""
        self._text += "" if self._has_ended else arguments
        if not self._has_begun:
            if not self._text.startswith(BEFORE_INPUT):
                return ""
            self._text, self._has_begun = self._text.removeprefix(BEFORE_INPUT), True
        match = CHARACTERS.match(self._text)
        end = 0 if match is None else match.end()
        characters, self._text = self._text[:end], self._text[end:]
        self._has_ended = bool(self._text)
        return msgspec.json.decode(f'"{characters}"', type=str)


def shell_arguments(action: Mapping[str, Any], field: str) -> str:
    """Return an *action* from the client's history as the arguments of the function that stands for the local shell.

    *field* names the action in errors. Raises InvalidValue.
    """
    arguments = decode(msgspec.json.encode(action), _SHELL_ARGUMENTS, field)
    return msgspec.json.encode(arguments).decode()


def _shell_action(arguments: str) -> LocalShellAction:
    """Return the action that a call to the local shell asks for. If the command is a single text, a shell runs it."""
    fields = _decoded(arguments)
    command = fields.get("command") if isinstance(fields, dict) else fields
    if not isinstance(command, list) or not all(isinstance(word, str) for word in command):
        command = ["sh", "-c", command if isinstance(command, str) else arguments]
    values = fields if isinstance(fields, dict) else {}
    timeout, variables = values.get("timeout_ms"), values.get("env")
    folder, user = values.get("working_directory"), values.get("user")
    return LocalShellAction(
        command,
        env={name: _as_text(value) for name, value in variables.items()} if isinstance(variables, dict) else {},
        timeout_ms=timeout if type(timeout) is int else None,
        working_directory=folder if isinstance(folder, str) else None,
        user=user if isinstance(user, str) else None,
    )


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _decoded(arguments: str) -> object:
    try:
        return msgspec.json.decode(arguments)
    except (msgspec.MsgspecError, RecursionError):
        return None

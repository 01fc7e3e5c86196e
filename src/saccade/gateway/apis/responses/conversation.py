"""Translates requests of the Responses API into chats: items become messages.

A FieldNames maps the chat's fields back to the client's.

An assistant's reasoning, text and calls are separate items in Responses, but a single message in a chat.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from saccade.errors import InvalidValue, UnsupportedParameter
from saccade.gateway.apis.chat_endpoint import FieldNames
from saccade.gateway.apis.responses.tools import (
    LOCAL_SHELL,
    DeclaredTools,
    choose_tools,
    custom_arguments,
    declare_tools,
    shell_arguments,
)
from saccade.gateway.apis.responses.wire import (
    CALL_TYPES,
    FORMAT_TYPES,
    ITEM_TYPES,
    RESULT_TYPES,
    SKIPPED_TYPES,
    Content,
    Format,
    Item,
    Part,
    ResponseRequest,
)
from saccade.gateway.apis.text_files import TextFiles, check_no_limits
from saccade.gateway.body_bounds import check_messages, check_tools
from saccade.gateway.chat_request import (
    CalledFunction,
    ChatMessage,
    ChatRequest,
    ContentPart,
    ImageUrl,
    JsonSchemaFormat,
    ResponseFormat,
    ToolCall,
)
from saccade.gateway.field_schemas import MAX_MESSAGES
from saccade.gateway.image_source import url_of_file
from saccade.gateway.json_body import is_given
from saccade.gateway.media_parameters import with_limits
from saccade.gateway.parameters import listed, printable
from saccade.gateway.prompt.media_parts import check_file

NAMES: Final = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "tool_choice.function.name": "tool_choice.name",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}
"""The Responses API's names of the ChatRequest fields that do not depend on the request."""

SOURCES: Final[dict[str, tuple[str, ...]]] = {
    "input_image": ("image_url", "file_id"),
    "input_file": ("file_data", "file_url", "file_id"),
}
"""The fields of parts that hold an image or a file, of which a part has one."""

TRUNCATION: Final = "`truncation` has no effect: a conversation that does not fit is refused"

SPELLING: Final = 'send {"type": "json_schema", "name": "answer", "schema": {...}} as `text.format`'


@dataclass
class Conversation:
    """Builds a chat's messages from items, and keeps the client's names for their fields.

    Calls in earlier turns refer to *tools*. *skipped* holds the types of the items that are left out.
    """

    tools: DeclaredTools
    messages: list[ChatMessage] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=lambda: dict(NAMES))
    skipped: list[str] = field(default_factory=list)
    files: TextFiles = field(default_factory=TextFiles)

    def add_message(self, name: str, message: ChatMessage) -> None:
        """Add a message that the client sent as the field *name*."""
        self.names[self.place] = name
        self.messages.append(message)

    @property
    def place(self) -> str:
        """The name of the next message's field."""
        return f"messages[{len(self.messages)}]"


@dataclass(frozen=True)
class ReadResponse:
    """The chat that a request begins or continues.

    - names: the client's names for the chat's fields.
    - tools: the tools that the chat declares.
    - warning: a warning for the client; "" if there is none.
    - num_known: how many of the chat's messages precede the request's input.
    """

    chat: ChatRequest
    names: FieldNames
    tools: DeclaredTools
    warning: str
    num_known: int


def read_conversation(request: ResponseRequest, known: Sequence[ChatMessage] = ()) -> ReadResponse:
    """Return the chat that *request* begins, or continues after the *known* messages of its previous response.

    Raises a RequestError that names the field.
    """
    tool_choice, tools = choose_tools(request.tool_choice, declare_tools(_named_tools(request)))
    chat = Conversation(tools)
    if request.instructions is not None:
        chat.add_message("instructions", ChatMessage(role="system", content=request.instructions))
    for message in known:
        chat.add_message("previous_response_id", message)
    num_known = len(chat.messages)
    if isinstance(request.input, str):
        chat.add_message("input", ChatMessage(role="user", content=request.input))
    else:
        _add_items(request.input, chat)
    if len(chat.messages) > MAX_MESSAGES:
        raise InvalidValue(f"The conversation has more than {MAX_MESSAGES} messages.", "input")
    check_messages(chat.messages)
    chat.names.update((f"tools[{place}].function", tool.field) for place, tool in enumerate(tools.tools))
    read = ChatRequest(
        model=request.model,
        messages=chat.messages,
        max_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        stream=request.stream,
        tools=[{"type": "function", "function": tool.function} for tool in tools.tools] or None,
        tool_choice=tool_choice,
        parallel_tool_calls=request.parallel_tool_calls,
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        verbosity=None if request.text is None else request.text.verbosity,
        response_format=None if request.text is None else _response_format(request.text.format),
        priority=request.priority,
    )
    return ReadResponse(read, FieldNames(chat.names), tools, _warning(request, chat), num_known)


def _named_tools(request: ResponseRequest) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (field, tool) for each tool of *request*; Codex may send tools as items."""
    for position, tool in enumerate(request.tools or ()):
        yield f"tools[{position}]", tool
    items = [
        (f"input[{index}].tools", item.tools)
        for index, item in enumerate(() if isinstance(request.input, str) else request.input)
        if isinstance(item, Item) and item.type == "additional_tools" and item.tools
    ]
    if items:
        # All items together have one list of tools.
        check_tools(msgspec.json.encode([tool for _, tools in items for tool in tools]), items[0][0])
    for name, tools in items:
        for position, tool in enumerate(tools):
            yield f"{name}[{position}]", tool


def _warning(request: ResponseRequest, chat: Conversation) -> str:
    """Return a warning about the parts of *request* that have no effect; "" if there are none."""
    remarks = [
        f"{what} are left out: {listed([printable(kind) for kind in kinds], len(kinds))}"
        for what, kinds in (
            ("tools that a server runs", dict.fromkeys(chat.tools.left_out)),
            ("namespaces without tools", dict.fromkeys(chat.tools.empty_namespaces)),
            ("items", dict.fromkeys(chat.skipped)),
        )
        if kinds
    ]
    remarks += [TRUNCATION] if request.truncation == "auto" else []
    return "; ".join(remarks)


def _add_items(items: Sequence[Item], chat: Conversation) -> None:
    turn: list[tuple[str, Item]] = []
    for index, item in enumerate(items):
        name = f"input[{index}]"
        if item.type in SKIPPED_TYPES:
            chat.skipped.append(item.type)
            continue
        if item.type not in ITEM_TYPES:
            raise UnsupportedParameter(
                f"`{name}.type`: items of this type are not served; send {', '.join(ITEM_TYPES)}.", f"{name}.type"
            )
        if item.type == "additional_tools":
            continue
        is_turn = item.type in ("reasoning", *CALL_TYPES) or item.role == "assistant"
        if turn and not (is_turn and _may_follow([one.type for _, one in turn], item.type)):
            chat.add_message(turn[0][0], _assistant(turn, chat))
            turn = []
        if is_turn:
            turn.append((name, item))
        else:
            chat.add_message(name, _input_message(item, name, chat))
    if turn:
        chat.add_message(turn[0][0], _assistant(turn, chat))


def _may_follow(turn: Sequence[str], item: str) -> bool:
    """Return whether an item of type *item* belongs to the turn that has items of the types *turn*.

    Chat templates write a turn's reasoning, then its text, then its calls. So text after a call joins the text before
    it, while text after text begins another turn.
    """
    match item:
        case "reasoning":
            return set(turn) == {"reasoning"}
        case "message":
            return turn[-1] != "message"
    return True


def _input_message(item: Item, name: str, chat: Conversation) -> ChatMessage:
    """Return a user, system or developer message, or the result of a call."""
    if item.type in RESULT_TYPES:
        # OpenAI's local_shell_call_output names its call in `id`.
        call_id = item.id if item.call_id is None and item.type == "local_shell_call_output" else item.call_id
        if call_id is None:
            raise InvalidValue(f"`{name}.call_id` is missing.", f"{name}.call_id")
        if isinstance(item.output, dict):
            raise InvalidValue(f"`{name}.output` must be a text or an array of parts.", f"{name}.output")
        return ChatMessage(role="tool", tool_call_id=call_id, content=_content(item.output, f"{name}.output", chat))
    if item.role not in ("user", "system", "developer"):
        raise InvalidValue(f"`{name}.role` must be user, assistant, system or developer.", f"{name}.role")
    return ChatMessage(role=item.role, content=_content(item.content, f"{name}.content", chat))


def _assistant(turn: Sequence[tuple[str, Item]], chat: Conversation) -> ChatMessage:
    reasoning = ""
    parts: list[ContentPart] = []
    calls: list[ToolCall] = []
    for name, item in turn:
        match item.type:
            case "reasoning":
                texts = [item.content] if isinstance(item.content, str) else [part.text for part in item.content or ()]
                reasoning += "".join(filter(None, texts))
            case "message" if item.content is not None:
                content = _content(item.content, f"{name}.content", chat, len(parts))
                parts += [ContentPart(type="text", text=content)] if isinstance(content, str) else content
            case "function_call" | "custom_tool_call" | "local_shell_call":
                chat.names[f"{chat.place}.tool_calls[{len(calls)}].function.arguments"] = f"{name}.arguments"
                calls.append(_call(item, name, chat.tools))
    return ChatMessage(
        role="assistant", content=parts or None, reasoning_content=reasoning or None, tool_calls=calls or None
    )


def _call(item: Item, name: str, tools: DeclaredTools) -> ToolCall:
    match item:
        case Item(type="local_shell_call", call_id=str(call_id), action=dict(action)):
            return ToolCall(call_id, CalledFunction(LOCAL_SHELL, shell_arguments(action, f"{name}.action")))
        case Item(type="custom_tool_call", call_id=str(call_id), name=str(tool), input=str(text)):
            arguments = custom_arguments(text)
        case Item(type="function_call", call_id=str(call_id), name=str(tool), arguments=str(arguments)):
            pass
        case _:
            raise _missing_of_call(item, name)
    return ToolCall(call_id, CalledFunction(tools.function_name(tool, item.namespace), arguments))


def _missing_of_call(item: Item, name: str) -> InvalidValue:
    """Return the error for a call in which a field is missing or malformed."""
    of_type = {"local_shell_call": ("action",), "custom_tool_call": ("name", "input")}
    fields = ("call_id", *of_type.get(item.type, ("name", "arguments")))
    key = next((key for key in fields if getattr(item, key) is None), fields[-1])
    fault = "is missing" if getattr(item, key) is None else "must be a JSON object, written as a text"
    return InvalidValue(f"`{name}.{key}` {fault}.", f"{name}.{key}")


def _content(content: Content | None, name: str, chat: Conversation, num_before: int = 0) -> str | list[ContentPart]:
    """Return *content* in the chat's format; *num_before* parts precede it in its message."""
    if content is None:
        raise InvalidValue(f"`{name}` is missing.", name)
    if isinstance(content, str):
        return content
    return [
        _part(part, f"{name}[{index}]", f"{chat.place}.content[{num_before + index}]", chat)
        for index, part in enumerate(content)
    ]


def _part(part: Part, name: str, place: str, chat: Conversation) -> ContentPart:
    chat.names[place] = name
    if part.type in SOURCES:
        _check_one_source(part, name)
    match part:
        case Part(type="input_text" | "output_text", text=str(text)) | Part(type="refusal", refusal=str(text)):
            return ContentPart(type="text", text=text)
        case Part(type="input_text" | "output_text"):
            raise InvalidValue(f"`{name}.text` is missing.", f"{name}.text")
        case Part(type="input_file") if (
            file_text := chat.files.read_file(part.file_data, part.filename, f"{name}.file_data")
        ) is not None:
            check_no_limits(part, name)
            return ContentPart(type="text", text=file_text)
        case Part(type="input_image" | "input_file"):
            source, url = _source(part, name)
            if part.type == "input_file" and part.file_data is not None:
                check_file(url, source)
            chat.names[f"{place}.image_url"] = chat.names[f"{place}.image_url.url"] = source
            image = ContentPart(type="image_url", image_url=ImageUrl(url, part.detail))
            return with_limits(image, part)
    raise UnsupportedParameter(
        f"`{name}.type`: parts of this type are not served here; send input_text, input_image and input_file.",
        f"{name}.type",
    )


def _check_one_source(part: Part, name: str) -> None:
    """Raise InvalidValue if *part* has no image or file, or more than one."""
    fields = SOURCES[part.type]
    keys = [key for key in fields if getattr(part, key) is not None]
    if not keys:
        raise InvalidValue(f"`{name}.{fields[0]}` is missing.", f"{name}.{fields[0]}")
    if len(keys) > 1:
        raise InvalidValue(
            f"`{name}.{keys[1]}`: the part has `{keys[0]}` already; send each file as a part of its own.",
            f"{name}.{keys[1]}",
        )


def _source(part: Part, name: str) -> tuple[str, str]:
    """Return the field of *part* that holds its image or file, and the URL of that image or file."""
    key, url = next((key, url) for key in SOURCES[part.type] if (url := getattr(part, key)) is not None)
    return f"{name}.{key}", url_of_file(url) if key == "file_id" else url


def _response_format(text_format: Format | None) -> ResponseFormat | None:
    if text_format is None:
        return None
    if text_format.type not in FORMAT_TYPES:
        raise InvalidValue(f"`text.format.type` must be {' or '.join(FORMAT_TYPES)}; {SPELLING}.", "text.format.type")
    for name in ("json_schema", "value"):
        if is_given(getattr(text_format, name)):
            raise InvalidValue(f"`text.format.{name}` is not read here; {SPELLING}.", f"text.format.{name}")
    has_schema = is_given(text_format.schema)
    if text_format.type == ("text" if has_schema else "json_schema"):
        fault = "has no effect on a text" if has_schema else "is missing"
        raise InvalidValue(f"`text.format.schema` {fault}; {SPELLING}.", "text.format.schema")
    if not has_schema:
        return ResponseFormat(text_format.type)
    return ResponseFormat("json_schema", JsonSchemaFormat(text_format.name, text_format.schema, text_format.strict))

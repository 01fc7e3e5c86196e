"""From Responses to chats: items become messages, and FieldNames map the chat's fields back to the client's.

The reasoning, the text and the calls of an assistant's turn are separate items here, but one message of a chat.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from saccade.errors import InvalidValue, UnsupportedParameter
from saccade.gateway.apis.chat_endpoint import FieldNames
from saccade.gateway.apis.responses.wire import ITEM_TYPES, Content, Format, FunctionTool, Item, Part, ResponseRequest
from saccade.gateway.chat import (
    MAX_MESSAGES,
    CalledFunction,
    ChatMessage,
    ChatRequest,
    ContentPart,
    ImageUrl,
    JsonSchemaFormat,
    ResponseFormat,
    ToolCall,
    url_of_file,
)
from saccade.gateway.json_body import ParameterReader, check_parts

LATER: Final[dict[str, tuple[object, ...]]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "moderation": (),
    "prompt": (),
    "truncation": ("disabled",),
}
"""Unsupported parameters that would change the answer, with the values, besides null, that change nothing."""

WITHOUT_EFFECT: Final = frozenset(
    {
        "client_metadata",
        "max_tool_calls",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "stream_options",
        "user",
    }
)
"""Parameters that change no answer; `max_tool_calls` is about tools that the server runs."""

LOGPROBS: Final = "message.output_text.logprobs"
NAMES: Final = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "tool_choice.function.name": "tool_choice.name",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""The Responses API's names of the ChatRequest fields that do not depend on the request."""

Recall = Callable[[str], Sequence[ChatMessage]]
"""Returns the conversation up to and including the response with an id."""


def parse_response(body: bytes | bytearray, strict: bool = False) -> tuple[ResponseRequest, str]:
    """Return the request in the *body* of POST /v1/responses, and a warning about ignored parameters.

    Raises BodyTooLarge, InvalidValue, and UnsupportedParameter for unsupported and, if *strict*, unknown parameters.
    """
    request, warning = _READER.read(body, strict)
    if request.top_logprobs or LOGPROBS in (request.include or ()):
        param = "top_logprobs" if request.top_logprobs else "include"
        raise UnsupportedParameter(f"`{param}`: log probabilities are not served here; chats have them.", param)
    return request, warning


@dataclass
class Conversation:
    """The messages of a chat that is built from items, and the client's names of their fields."""

    messages: list[ChatMessage] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=lambda: dict(NAMES))

    def add(self, name: str, message: ChatMessage) -> None:
        """Add a message that comes from the client's field *name*."""
        self.names[self.place] = name
        self.messages.append(message)

    @property
    def place(self) -> str:
        """The field of the next message."""
        return f"messages[{len(self.messages)}]"


def read_conversation(request: ResponseRequest, recall: Recall) -> tuple[ChatRequest, FieldNames, int]:
    """Return the chat that *request* continues, its fields' names, and how many of its messages are not new.

    Raises RequestError that names the field.
    """
    chat = Conversation()
    if request.instructions is not None:
        chat.add("instructions", ChatMessage(role="system", content=request.instructions))
    if request.previous_response_id is not None:
        for message in recall(request.previous_response_id):
            chat.add("previous_response_id", message)
    num_known = len(chat.messages)
    if isinstance(request.input, str):
        chat.add("input", ChatMessage(role="user", content=request.input))
    else:
        _add_items(request.input, chat)
    if len(chat.messages) > MAX_MESSAGES:
        raise InvalidValue(f"The conversation has more than {MAX_MESSAGES} messages.", "input")
    check_parts(chat.messages)
    for position in range(len(request.tools or ())):
        chat.names[f"tools[{position}].function"] = f"tools[{position}]"
    read = ChatRequest(
        model=request.model,
        messages=chat.messages,
        max_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        stream=request.stream,
        tools=None if request.tools is None else _tools(request.tools),
        tool_choice=_tool_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        response_format=None if request.text is None else _response_format(request.text.format),
    )
    return read, FieldNames(chat.names), num_known


def _add_items(items: Sequence[Item], chat: Conversation) -> None:
    turn: list[tuple[str, Item]] = []
    for index, item in enumerate(items):
        name = f"input[{index}]"
        if item.type not in ITEM_TYPES:
            raise UnsupportedParameter(
                f"`{name}.type`: items of this type are not served; send {', '.join(ITEM_TYPES)}.", f"{name}.type"
            )
        is_turn = item.type in ("reasoning", "function_call") or item.role == "assistant"
        if turn and not (is_turn and _may_follow([one.type for _, one in turn], item.type)):
            chat.add(turn[0][0], _assistant(turn, chat))
            turn = []
        if is_turn:
            turn.append((name, item))
        else:
            chat.add(name, _input_message(item, name, chat))
    if turn:
        chat.add(turn[0][0], _assistant(turn, chat))


def _may_follow(turn: Sequence[str], item: str) -> bool:
    """Whether an item of this type belongs to the same turn as the items of the types *turn*.

    Chat templates write a turn's reasoning, then its text, then its calls. So text after a call joins the text before
    the call, and text after text begins another turn.
    """
    match item:
        case "reasoning":
            return set(turn) == {"reasoning"}
        case "message":
            return turn[-1] != "message"
    return True


def _input_message(item: Item, name: str, chat: Conversation) -> ChatMessage:
    """Return the message of a user, or the result of a call."""
    if item.type == "function_call_output":
        if item.call_id is None:
            raise InvalidValue(f"`{name}.call_id` is missing.", f"{name}.call_id")
        content = _content(item.output, f"{name}.output", chat)
        return ChatMessage(role="tool", tool_call_id=item.call_id, content=content)
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
                reasoning += "".join(part.text or "" for part in item.content or () if isinstance(part, Part))
            case "message" if item.content is not None:
                content = _content(item.content, f"{name}.content", chat, len(parts))
                parts += [ContentPart(type="text", text=content)] if isinstance(content, str) else content
            case "function_call":
                chat.names[f"{chat.place}.tool_calls[{len(calls)}].function.arguments"] = f"{name}.arguments"
                calls.append(_call(item, name))
    return ChatMessage(
        role="assistant", content=parts or None, reasoning_content=reasoning or None, tool_calls=calls or None
    )


def _call(item: Item, name: str) -> ToolCall:
    for key in ("call_id", "name", "arguments"):
        if getattr(item, key) is None:
            raise InvalidValue(f"`{name}.{key}` is missing.", f"{name}.{key}")
    return ToolCall(item.call_id or "", CalledFunction(item.name or "", item.arguments or ""))


def _content(content: Content | None, name: str, chat: Conversation, num_before: int = 0) -> str | list[ContentPart]:
    """Return *content* in the form of a chat; *num_before* parts precede it in its message."""
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
    match part:
        case Part(type="input_text" | "output_text", text=str(text)) | Part(type="refusal", refusal=str(text)):
            return ContentPart(type="text", text=text)
        case Part(type="input_text" | "output_text"):
            raise InvalidValue(f"`{name}.text` is missing.", f"{name}.text")
        case Part(type="input_image" | "input_file"):
            source, url = _source(part, name)
            chat.names[f"{place}.image_url"] = chat.names[f"{place}.image_url.url"] = source
            return ContentPart(type="image_url", image_url=ImageUrl(url, part.detail))
    raise UnsupportedParameter(
        f"`{name}.type`: parts of this type are not served here; send input_text, input_image and input_file.",
        f"{name}.type",
    )


def _source(part: Part, name: str) -> tuple[str, str]:
    """Return the field of *part* that has its image or file, and the URL in it."""
    fields = ("image_url", "file_id") if part.type == "input_image" else ("file_data", "file_url", "file_id")
    for key in fields:
        if (url := getattr(part, key)) is not None:
            return f"{name}.{key}", url_of_file(url) if key == "file_id" else url
    raise InvalidValue(f"`{name}.{fields[0]}` is missing.", f"{name}.{fields[0]}")


def _tools(tools: Sequence[FunctionTool]) -> list[dict[str, Any]]:
    return [_tool(tool, f"tools[{position}]") for position, tool in enumerate(tools)]


def _tool(tool: FunctionTool, name: str) -> dict[str, Any]:
    if tool.type != "function":
        raise UnsupportedParameter(
            f'`{name}.type`: only tools of the type "function" are served, which the client runs.', f"{name}.type"
        )
    if tool.name is None:
        raise InvalidValue(f"`{name}.name` is missing.", f"{name}.name")
    fields = {"description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    function = {"name": tool.name} | {key: value for key, value in fields.items() if value is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    match choice:
        case None | "auto" | "none" | "required":
            return choice
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
    raise InvalidValue(
        '`tool_choice` must be "auto", "none", "required" or {"type": "function", "name": ...}.', "tool_choice"
    )


def _response_format(text_format: Format | None) -> ResponseFormat | None:
    if text_format is None:
        return None
    if text_format.type != "json_schema":
        return ResponseFormat(text_format.type)
    return ResponseFormat("json_schema", JsonSchemaFormat(text_format.name, text_format.schema, text_format.strict))


_READER: Final = ParameterReader(ResponseRequest, later=LATER, without_effect=WITHOUT_EFFECT)

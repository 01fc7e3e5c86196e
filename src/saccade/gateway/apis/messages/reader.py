"""From Anthropic's messages to a chat.

Turns are translated block by block: images become data: URLs, calls of tools join the assistant's message, and each
result of a tool becomes a separate message. FieldNames map the chat's fields back to the client's.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from saccade.errors import InvalidValue, UnsupportedParameter
from saccade.gateway.apis.chat_endpoint import FieldNames
from saccade.gateway.apis.messages.wire import (
    BLOCK_TYPES,
    Block,
    Content,
    CountRequest,
    Message,
    MessagesRequest,
    Source,
    Tool,
)
from saccade.gateway.chat import (
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
    "container": (),
    "context_management": ({"edits": []}, {}),
    "mcp_servers": ([],),
    "output_format": (),
    "speed": ("standard",),
}
"""Unsupported parameters that would change the answer, with the values, besides null, that change nothing."""

WITHOUT_EFFECT: Final = frozenset(
    {
        "betas",
        "cache_control",
        "diagnostics",
        "inference_geo",
        "metadata",
        "service_tier",
        "user_profile_id",
        "workspace_id",
    }
)
"""Parameters that change no answer."""

NAMES: Final = {
    "stop": "stop_sequences",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "tool_choice.function.name": "tool_choice.name",
    "response_format": "output_config.format",
    "response_format.json_schema.schema": "output_config.format.schema",
    "continue_final_message": "messages",
    "enable_thinking": "thinking.type",
    "include_reasoning": "thinking.display",
    "thinking_token_budget": "thinking.budget_tokens",
}
"""Anthropic's names of the ChatRequest fields that do not depend on the request."""

IN_TURNS: Final = ("thinking", "text", "tool_use")
"""The blocks of an assistant's turn."""

BILLING_HEADER: Final = "x-anthropic-billing-header:"
"""Begins a block that Claude Code adds to `system` for Anthropic's bills: the only text of a request that is left out.

It differs in each request, so a prompt with it would find nothing in a cache.
"""

MEDIA_TYPE: Final = re.compile(r"[a-zA-Z0-9.+-]+/[a-zA-Z0-9.+-]+")
_IMAGE: Final = re.compile(rb'"data(?::|"[ \t\r\n]{0,8}:[ \t\r\n]{0,8}")')


def find_image(body: bytes | bytearray, start: int, end: int) -> int:
    """Find images in the format of Anthropic's API, `data` in base64 or data: URLs; a FindImage."""
    match = _IMAGE.search(body, start, end)
    return -1 if match is None else match.end()


def parse_messages(body: bytes | bytearray, strict: bool = False) -> tuple[ChatRequest, str, FieldNames]:
    """Return the chat in the *body* of POST /v1/messages, a warning about ignored parameters, and the fields' names.

    Raises BodyTooLarge, InvalidValue, and UnsupportedParameter for unsupported and, if *strict*, unknown parameters.
    """
    request, warning = _MESSAGES.read(body, strict)
    sampling = {name: getattr(request, name) for name in ("max_tokens", "stream", "temperature", "top_p", "top_k")}
    chat, names = _chat(request, sampling | {"stop": request.stop_sequences})
    return chat, warning, names


def parse_count(body: bytes | bytearray, strict: bool = False) -> tuple[ChatRequest, str, FieldNames]:
    """Return the chat in the *body* of POST /v1/messages/count_tokens. Raises as parse_messages does."""
    request, warning = _COUNT.read(body, strict)
    chat, names = _chat(request, {})
    return chat, warning, names


def _chat(request: CountRequest, sampling: dict[str, Any]) -> tuple[ChatRequest, FieldNames]:
    """Return the chat in *request* with the fields *sampling*, and the fields' names."""
    messages: list[ChatMessage] = []
    names = dict(NAMES)
    if request.system is not None:
        messages.append(ChatMessage(role="system", content=_system(request.system, names)))
        names["messages[0]"] = "system"
    for position, message in enumerate(request.messages):
        for field, turn in _turns(message, f"messages[{position}]", len(messages), names):
            names[f"messages[{len(messages)}]"] = field
            messages.append(turn)
    fields: dict[str, Any] = {"model": request.model, "messages": messages}
    if request.messages[-1].role == "assistant":
        fields["continue_final_message"] = True
    fields |= _tools(request, names) | _tool_choice(request) | _thinking(request) | _output_config(request)
    chat = ChatRequest(**fields, **sampling)
    check_parts(chat.messages)
    return chat, FieldNames(names)


def _system(system: Content, names: dict[str, str]) -> str | list[ContentPart]:
    if isinstance(system, str):
        return system
    blocks = [
        (f"system[{at}]", block) for at, block in enumerate(system) if not (block.text or "").startswith(BILLING_HEADER)
    ]
    return [_part(block, name, f"messages[0].content[{place}]", names) for place, (name, block) in enumerate(blocks)]


def _turns(message: Message, field: str, position: int, names: dict[str, str]) -> Iterator[tuple[str, ChatMessage]]:
    """Yield the chat messages of *message*, which begin at number *position*, each after its field."""
    if message.role not in ("user", "assistant", "system"):
        raise InvalidValue(f"`{field}.role` must be user, assistant or system.", f"{field}.role")
    if isinstance(message.content, str):
        yield field, ChatMessage(role=message.role, content=message.content)
        return
    blocks = [(f"{field}.content[{index}]", block) for index, block in enumerate(message.content or ())]
    if message.role == "assistant":
        yield field, _assistant(blocks, position, names)
        return
    if not message.content:
        fault = "is missing" if message.content is None else "is empty"
        raise InvalidValue(f"`{field}.content` {fault}.", f"{field}.content")
    if message.role == "system":
        content = _parts(message.content, f"{field}.content", f"messages[{position}].content", names)
        yield field, ChatMessage(role="system", content=content)
        return
    user_blocks: list[tuple[str, Block]] = []
    for name, block in blocks:
        if block.type != "tool_result":
            user_blocks.append((name, block))
            continue
        if user_blocks:
            raise InvalidValue(f"`{name}`: results of tools must come before other blocks.", name)
        yield name, _result(block, name, position, names)
        position += 1
    if user_blocks:
        parts = [
            _part(block, name, f"messages[{position}].content[{index}]", names)
            for index, (name, block) in enumerate(user_blocks)
        ]
        yield field, ChatMessage(role="user", content=parts)


def _assistant(blocks: Sequence[tuple[str, Block]], position: int, names: dict[str, str]) -> ChatMessage:
    """Return a turn; chat templates write all of its text before its calls."""
    reasoning: list[str] = []
    parts: list[ContentPart] = []
    calls: list[ToolCall] = []
    for name, block in blocks:
        if block.type not in IN_TURNS:
            raise _not_served(block, name)
        if block.type == "thinking" and (parts or calls):
            raise UnsupportedParameter(
                f"`{name}`: chat templates write a turn's thinking before its text and its calls; put it first.", name
            )
        match block:
            case Block(type="thinking", thinking=str(thinking)):
                reasoning.append(thinking)
            case Block(type="thinking"):
                raise InvalidValue(f"`{name}.thinking` is missing.", f"{name}.thinking")
            case Block(type="tool_use"):
                names[f"messages[{position}].tool_calls[{len(calls)}].function.arguments"] = f"{name}.input"
                names[f"messages[{position}].tool_calls[{len(calls)}]"] = name
                calls.append(_call(block, name))
            case _:
                parts.append(_part(block, name, f"messages[{position}].content[{len(parts)}]", names))
    return ChatMessage(
        role="assistant",
        content=parts or None,
        reasoning_content="".join(reasoning) or None,
        tool_calls=calls or None,
    )


def _call(block: Block, field: str) -> ToolCall:
    for name in ("id", "name", "input"):
        if getattr(block, name) is None:
            raise InvalidValue(f"`{field}.{name}` is missing.", f"{field}.{name}")
    arguments = msgspec.json.encode(block.input).decode()
    return ToolCall(block.id or "", CalledFunction(block.name or "", arguments))


def _result(block: Block, field: str, position: int, names: dict[str, str]) -> ChatMessage:
    if block.tool_use_id is None:
        raise InvalidValue(
            f"`{field}.tool_use_id` is missing; it is the `id` of the call that the block answers.",
            f"{field}.tool_use_id",
        )
    content = _parts(block.content or "", f"{field}.content", f"messages[{position}].content", names)
    return ChatMessage(role="tool", tool_call_id=block.tool_use_id, content=content)


def _parts(content: Content, field: str, chat_field: str, names: dict[str, str]) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    return [_part(block, f"{field}[{index}]", f"{chat_field}[{index}]", names) for index, block in enumerate(content)]


def _part(block: Block, field: str, chat_field: str, names: dict[str, str]) -> ContentPart:
    """Return *block* as the part *chat_field* of a chat."""
    names[chat_field] = field
    match block:
        case Block(type="text", text=str(text)):
            return ContentPart(type="text", text=text)
        case Block(type="text"):
            raise InvalidValue(f"`{field}.text` is missing.", f"{field}.text")
        case Block(type="document", source=Source(type="text", data=str(text))):
            return ContentPart(type="text", text=text)
        case Block(type="image" | "document", source=Source() as source):
            name, url = _url(source, f"{field}.source")
            names[f"{chat_field}.image_url"] = names[f"{chat_field}.image_url.url"] = name
            return ContentPart(type="image_url", image_url=ImageUrl(url))
        case Block(type="image" | "document"):
            raise InvalidValue(f"`{field}.source` is missing.", f"{field}.source")
    raise _not_served(block, field)


def _url(source: Source, field: str) -> tuple[str, str]:
    """Return the field that holds an image, and its URL."""
    match source:
        case Source(type="base64", data=str(data), media_type=media_type):
            if media_type is not None and not MEDIA_TYPE.fullmatch(media_type):
                raise InvalidValue(
                    f"`{field}.media_type` must be a media type such as image/png.", f"{field}.media_type"
                )
            return f"{field}.data", f"data:{media_type or 'image/*'};base64,{data}"
        case Source(type="base64"):
            raise InvalidValue(f"`{field}.data` is missing.", f"{field}.data")
        case Source(type="url", url=str(url)):
            return f"{field}.url", url
        case Source(type="url"):
            raise InvalidValue(f"`{field}.url` is missing.", f"{field}.url")
        case Source(type="file", file_id=str(file_id)):
            return f"{field}.file_id", url_of_file(file_id)
        case Source(type="file"):
            raise InvalidValue(f"`{field}.file_id` is missing.", f"{field}.file_id")
    raise UnsupportedParameter(f"`{field}.type`: only base64, url and file are served.", f"{field}.type")


def _not_served(block: Block, field: str) -> InvalidValue | UnsupportedParameter:
    if block.type in BLOCK_TYPES:
        return InvalidValue(f"`{field}`: a block of the type {block.type} does not belong here.", field)
    return UnsupportedParameter(
        f"`{field}.type`: blocks of this type are not served; send {', '.join(BLOCK_TYPES)}.", f"{field}.type"
    )


def _tools(request: CountRequest, names: dict[str, str]) -> dict[str, Any]:
    if request.tools is None:
        return {}
    for position in range(len(request.tools)):
        names[f"tools[{position}].function"] = f"tools[{position}]"
        names[f"tools[{position}].function.parameters"] = f"tools[{position}].input_schema"
    return {"tools": [_tool(tool, f"tools[{position}]") for position, tool in enumerate(request.tools)]}


def _tool(tool: Tool, field: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise UnsupportedParameter(
            f"`{field}.type`: tools that the server runs are not served; declare a tool by `name` and `input_schema`.",
            f"{field}.type",
        )
    if tool.input_schema is None:
        raise InvalidValue(f"`{field}.input_schema` is missing.", f"{field}.input_schema")
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
        case "any":
            return {**fields, "tool_choice": "required"}
        case "tool" if choice.name is not None:
            return {**fields, "tool_choice": {"type": "function", "function": {"name": choice.name}}}
        case "tool":
            raise InvalidValue("`tool_choice.name` is missing.", "tool_choice.name")
    raise InvalidValue("`tool_choice.type` must be auto, any, tool or none.", "tool_choice.type")


def _thinking(request: CountRequest) -> dict[str, Any]:
    thinking = request.thinking
    if thinking is None:
        return {}
    fields: dict[str, Any] = {"include_reasoning": False} if thinking.display == "omitted" else {}
    if thinking.type == "enabled":
        fields["thinking_token_budget"] = thinking.budget_tokens
    # An adaptive model decides by itself, as models do without the switch.
    return fields if thinking.type == "adaptive" else {**fields, "enable_thinking": thinking.type == "enabled"}


def _output_config(request: CountRequest) -> dict[str, Any]:
    config = request.output_config
    if config is None or config.format is None:
        return {}
    schema = JsonSchemaFormat(schema=config.format.schema, strict=True)
    return {"response_format": ResponseFormat("json_schema", schema)}


_MESSAGES: Final = ParameterReader(MessagesRequest, later=LATER, without_effect=WITHOUT_EFFECT, find_image=find_image)
_COUNT: Final = ParameterReader(
    CountRequest, (MessagesRequest,), later=LATER, without_effect=WITHOUT_EFFECT, find_image=find_image
)

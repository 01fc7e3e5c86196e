"""Translates Anthropic's messages into a chat.

Turns are translated block by block: base64 images become data: URLs, tool calls join the assistant's message, and each
tool result becomes a message. A FieldNames maps the chat's fields back to the client's.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final

import msgspec

from saccade.errors import InvalidValue
from saccade.gateway.apis.chat_endpoint import FieldNames, Format, ReadBody
from saccade.gateway.apis.messages.blocks import Named, Reading, named_blocks, not_served, parts_of, skipped_blocks
from saccade.gateway.apis.messages.edits import ignored_edits
from saccade.gateway.apis.messages.tools import own_tools, tool_fields
from saccade.gateway.apis.messages.wire import (
    Block,
    Content,
    CountRequest,
    Message,
    MessagesRequest,
)
from saccade.gateway.apis.messages.writer import MessageEvents, MessageObject, write_failure
from saccade.gateway.body_bounds import check_messages
from saccade.gateway.chat_request import (
    CalledFunction,
    ChatMessage,
    ChatRequest,
    ContentPart,
    JsonSchemaFormat,
    ResponseFormat,
    ToolCall,
)
from saccade.gateway.json_body import is_given
from saccade.gateway.known_parameters import CONSTRAINTS, NO_CONSTRAINT
from saccade.gateway.parameters import Body, ParameterReader, listed

LATER: Final[dict[str, tuple[object, ...]]] = {
    "container": (),
    "input": ("", []),
    "instructions": ("",),
    "mcp_servers": ([],),
    "prompt": ("", []),
    **dict.fromkeys(CONSTRAINTS, NO_CONSTRAINT),
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
        "speed",
        "user_profile_id",
        "workspace_id",
    }
)
"""Parameters that change no answer."""

NAMES: Final = {
    "stop": "stop_sequences",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "tool_choice.function.name": "tool_choice.name",
    "continue_final_message": "messages",
    "enable_thinking": "thinking.type",
    "include_reasoning": "thinking.display",
    "thinking_token_budget": "thinking.budget_tokens",
}
"""Anthropic's names of the ChatRequest fields that do not depend on the request."""

EFFORT: Final = "`output_config.effort` has no effect: `thinking` sets whether a model reasons"
SPELLING: Final = 'send {"format": {"type": "json_schema", "schema": {...}}} as `output_config`'
IN_TURNS: Final = ("thinking", "text", "tool_use")
"""The blocks of an assistant's turn."""

BILLING_HEADER: Final = "x-anthropic-billing-header:"
"""Begins a block that Claude Code adds to `system` for Anthropic's bills: the only text of a request that is left out.

It differs in each request, so a prompt with it would find nothing in a cache.
"""

_IMAGE: Final = re.compile(rb'"data(?::|"[ \t\r\n]{0,8}:[ \t\r\n]{0,8}")')


def find_image(body: bytes | bytearray, start: int, end: int) -> int:
    """Find the next image in Anthropic's format: base64 in `data`, or a data: URL. This function is a FindImage."""
    match = _IMAGE.search(body, start, end)
    return -1 if match is None else match.end()


class MessagesChat(ChatRequest, frozen=True, kw_only=True):
    """A chat that arrives through this API.

    *max_tokens* may exceed the context: agents ask for as many tokens as Anthropic's models allow.
    """

    clamps_max_tokens: ClassVar[bool] = True


def parse_messages(body: Body, strict: bool = False) -> tuple[ChatRequest, str, FieldNames]:
    """Parse the *body* of POST /v1/messages.

    Return the chat, a warning about ignored fields, and the client's names for the chat's fields.

    Raises BodyTooLarge, InvalidValue, and UnsupportedParameter for unsupported and, if *strict*, unknown parameters.
    """
    request, warning = _MESSAGES.read_parameters(body, strict)
    sampling = {name: getattr(request, name) for name in ("max_tokens", "stream", "temperature", "top_p", "top_k")}
    chat, names = _chat(request, sampling | {"stop": request.stop_sequences})
    return chat, _with_omissions(warning, request), names


def parse_count(body: Body, strict: bool = False) -> tuple[ChatRequest, str, FieldNames]:
    """Parse the *body* of POST /v1/messages/count_tokens. Returns and raises the same as parse_messages()."""
    request, warning = _COUNT.read_parameters(body, strict)
    chat, names = _chat(request, {})
    return chat, _with_omissions(warning, request), names


def _with_omissions(warning: str, request: CountRequest) -> str:
    """Return *warning*, extended with the parts of *request* that have no effect."""
    management = request.context_management
    edits = () if management is None else management.edits or ()
    omissions = {
        "blocks left out": skipped_blocks(request),
        "tools of Anthropic's own types left out": own_tools(request),
        "edits of context_management not made": ignored_edits(edits, request.messages),
    }
    named = [f"{what}: {listed(names, len(names))}" for what, names in omissions.items() if names]
    if request.output_config is not None and request.output_config.effort is not None:
        named.append(EFFORT)
    return "; ".join(filter(None, (warning, *named)))


def _chat(request: CountRequest, sampling: dict[str, Any]) -> tuple[ChatRequest, FieldNames]:
    """Return *request* as a chat that also has the fields *sampling*, and the client's names for the chat's fields."""
    messages: list[ChatMessage] = []
    reading = Reading(dict(NAMES))
    names = reading.names
    if request.system is not None:
        messages.append(ChatMessage(role="system", content=_system(request.system, reading)))
        names["messages[0]"] = "system"
    for position, message in enumerate(request.messages):
        for field, turn in _turns(message, f"messages[{position}]", len(messages), reading):
            names[f"messages[{len(messages)}]"] = field
            messages.append(turn)
    fields: dict[str, Any] = {"model": request.model, "messages": messages}
    if request.messages[-1].role == "assistant":
        fields["continue_final_message"] = True
    fields |= tool_fields(request, names) | _thinking(request) | _output_format(request, names)
    chat = MessagesChat(**fields, **sampling)
    check_messages(chat.messages)
    return chat, FieldNames(names)


def _system(system: Content, reading: Reading) -> str | list[ContentPart]:
    if isinstance(system, str):
        return system
    blocks = named_blocks(system, "system")
    read = [(name, block) for name, block in blocks if not (block.text or "").startswith(BILLING_HEADER)]
    return parts_of(read, "messages[0].content", reading)


def _turns(message: Message, field: str, position: int, reading: Reading) -> Iterator[tuple[str, ChatMessage]]:
    """Yield (field, chat message) for each part of *message*; the first becomes number *position* in the chat."""
    if message.role not in ("user", "assistant", "system"):
        raise InvalidValue(f"`{field}.role` must be user, assistant or system.", f"{field}.role")
    if isinstance(message.content, str):
        yield field, ChatMessage(role=message.role, content=message.content)
        return
    blocks = named_blocks(message.content or (), f"{field}.content")
    if message.role == "assistant":
        yield field, _assistant(blocks, position, reading)
        return
    if not message.content:
        fault = "is missing" if message.content is None else "is empty"
        raise InvalidValue(f"`{field}.content` {fault}.", f"{field}.content")
    others: list[Named] = []
    first = position
    for name, block in blocks:
        if block.type != "tool_result" or message.role != "user":
            others.append((name, block))
            continue
        if others:
            raise InvalidValue(f"`{name}`: results of tools must come before other blocks.", name)
        yield name, _result(block, name, position, reading)
        position += 1
    if others or position == first:
        content = parts_of(others, f"messages[{position}].content", reading)
        # A turn of blocks that are skipped keeps its place.
        yield field, ChatMessage(role=message.role, content=content or "")


def _assistant(blocks: Sequence[Named], position: int, reading: Reading) -> ChatMessage:
    """Return an assistant's turn. Chat templates write the thinking first, then all text, then the calls."""
    reasoning: list[str] = []
    texts: list[Named] = []
    calls: list[ToolCall] = []
    for name, block in blocks:
        if block.type not in IN_TURNS:
            raise not_served(block, name)
        match block:
            case Block(type="thinking", thinking=str(thinking)):
                reasoning.append(thinking)
            case Block(type="thinking"):
                raise InvalidValue(f"`{name}.thinking` is missing.", f"{name}.thinking")
            case Block(type="tool_use"):
                place = f"messages[{position}].tool_calls[{len(calls)}]"
                reading.names.update({place: name, f"{place}.function.arguments": f"{name}.input"})
                calls.append(_call(block, name))
            case _:
                texts.append((name, block))
    return ChatMessage(
        role="assistant",
        content=parts_of(texts, f"messages[{position}].content", reading) or None,
        reasoning_content="\n\n".join(filter(None, reasoning)) or None,
        tool_calls=calls or None,
    )


def _call(block: Block, field: str) -> ToolCall:
    for name in ("id", "name", "input"):
        if getattr(block, name) is None:
            raise InvalidValue(f"`{field}.{name}` is missing.", f"{field}.{name}")
    arguments = msgspec.json.encode(block.input).decode()
    return ToolCall(block.id or "", CalledFunction(block.name or "", arguments))


def _result(block: Block, field: str, position: int, reading: Reading) -> ChatMessage:
    if block.tool_use_id is None:
        raise InvalidValue(
            f"`{field}.tool_use_id` is missing; it is the `id` of the call that the block answers.",
            f"{field}.tool_use_id",
        )
    content: str | list[ContentPart]
    if isinstance(block.content, str):
        content = block.content
    else:
        blocks = named_blocks(block.content or (), f"{field}.content")
        content = parts_of(blocks, f"messages[{position}].content", reading) or ""
    return ChatMessage(role="tool", tool_call_id=block.tool_use_id, content=content)


def _thinking(request: CountRequest) -> dict[str, Any]:
    thinking = request.thinking
    if thinking is None:
        return {}
    fields: dict[str, Any] = {"include_reasoning": False} if thinking.display == "omitted" else {}
    if thinking.type == "enabled":
        fields["thinking_token_budget"] = thinking.budget_tokens
    # An adaptive model decides by itself, as models do without the switch.
    return fields if thinking.type == "adaptive" else {**fields, "enable_thinking": thinking.type == "enabled"}


def _output_format(request: CountRequest, names: dict[str, str]) -> dict[str, Any]:
    field, form = "output_config.format", None if request.output_config is None else request.output_config.format
    if request.output_format is not None:
        if form is not None:
            raise InvalidValue(
                f"`output_format` and `{field}` cannot both constrain the answer; send one of them.", "output_format"
            )
        field, form = "output_format", request.output_format
    if form is None:
        return {}
    if form.type != "json_schema":
        raise InvalidValue(f"`{field}.type` must be json_schema; {SPELLING}.", f"{field}.type")
    if not is_given(form.schema):
        raise InvalidValue(f"`{field}.schema` is missing.", f"{field}.schema")
    names["response_format"], names["response_format.json_schema.schema"] = field, f"{field}.schema"
    return {"response_format": ResponseFormat("json_schema", JsonSchemaFormat(schema=form.schema, strict=True))}


_PARAMETERS: Final[dict[str, Any]] = {
    "later": LATER,
    "without_effect": WITHOUT_EFFECT,
    "spellings": {
        **dict.fromkeys(CONSTRAINTS, SPELLING),
        **dict.fromkeys(("input", "prompt"), "send it as a message of the role user, in `messages`"),
        "instructions": "send it as `system`",
    },
    "find_image": find_image,
}
_MESSAGES: Final = ParameterReader(MessagesRequest, **_PARAMETERS)
_COUNT: Final = ParameterReader(CountRequest, (MessagesRequest,), **_PARAMETERS)


def read_messages(strict: bool, body: Body, tenant: bytes) -> ReadBody:
    """Read the body of POST /v1/messages. Once `partial` has bound *strict*, this function is a ReadApi."""
    request, warning, names = parse_messages(body, strict)
    writer = MessageEvents if request.stream else MessageObject
    return ReadBody(request, warning, [Format(names, writer, write_failure)])


def read_count(strict: bool, body: Body, tenant: bytes) -> ReadBody:
    """Read the body of POST /v1/messages/count_tokens.

    Once `partial` has bound *strict*, this function is a ReadApi. No answer uses the format that it returns.
    """
    request, warning, names = parse_count(body, strict)
    return ReadBody(request, warning, [Format(names, MessageObject, write_failure)])

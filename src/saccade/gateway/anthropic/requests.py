"""Anthropic's wire format: requests. Source: the API reference of Anthropic's Messages, version 2023-06-01."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from saccade.gateway.openai.requests import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_STOP_STRINGS,
    MAX_TOOLS,
    MAX_TOP_K,
    TOOL_NAME,
    CallId,
    Count,
    JsonSchema,
    StopText,
)

# Some fields are checked by code, with better errors; the schemas here are for the description of the API.
BLOCK_TYPES = ("text", "image", "thinking", "tool_use", "tool_result")
BlockType = Annotated[str, Meta(extra_json_schema={"enum": list(BLOCK_TYPES)})]
SourceType = Annotated[str, Meta(extra_json_schema={"enum": ["base64", "url", "file"]})]
MessageRole = Annotated[str, Meta(extra_json_schema={"enum": ["user", "assistant", "system"]})]
ToolType = Annotated[str, Meta(extra_json_schema={"enum": ["custom"]})]
ToolName = Annotated[str, Meta(extra_json_schema={"pattern": f"^{TOOL_NAME}$"})]
SchemaSchema = {"properties": {"type": {"type": "string", "enum": ["object"]}}}
InputSchema = Annotated[dict[str, Any], Meta(extra_json_schema=SchemaSchema)]
ChoiceType = Annotated[str, Meta(extra_json_schema={"enum": ["auto", "any", "tool", "none"]})]


class Source(Struct, frozen=True):
    """An image: its bytes in base64 as *data*, its *url*, or the *file_id* of one that was uploaded."""

    type: SourceType
    media_type: Annotated[str, Meta(max_length=64)] | None = None
    data: str | None = None
    url: str | None = None
    file_id: str | None = None


class Block(Struct, frozen=True):
    """A piece of a message; which fields it has follows from its *type*.

    *signature* of thinking, and *is_error* of a result, are accepted and have no effect.
    """

    type: BlockType
    text: str | None = None
    source: Source | None = None
    thinking: str | None = None
    signature: str | None = None
    id: CallId | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: CallId | None = None
    content: "str | Annotated[list[Block], Meta(max_length=MAX_PARTS)] | None" = None
    is_error: bool | None = None


Content = str | Annotated[list[Block], Meta(max_length=MAX_PARTS)]


class Message(Struct, frozen=True):
    """One turn."""

    role: MessageRole
    content: Content


class Tool(Struct, frozen=True):
    """A function that the answer may call, with the JSON schema of its arguments."""

    name: ToolName
    input_schema: InputSchema | None = None
    description: str | None = None
    type: ToolType | None = None
    strict: bool | None = None


class ToolChoice(Struct, frozen=True):
    """Whether tools are called: *name* is that of the tool where the type is "tool"."""

    type: ChoiceType
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, frozen=True):
    """Whether the answer reasons first; *display* "omitted" leaves the reasoning out of the answer."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Struct, frozen=True):
    """What the answer is: JSON by a schema."""

    type: Literal["json_schema"]
    schema: JsonSchema


class OutputConfig(Struct, frozen=True):
    """What the answer is like. An *effort* has no effect: whether a model reasons is set by `thinking`."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]


class CountRequest(Struct, frozen=True, kw_only=True):
    """The body of POST /v1/messages/count_tokens."""

    model: str
    messages: Messages
    system: Content | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """The body of POST /v1/messages. Names and meanings are Anthropic's; bounds are those of chats."""

    max_tokens: Count
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOP_K)] | None = None
    stop_sequences: Annotated[list[StopText], Meta(max_length=MAX_STOP_STRINGS)] | None = None

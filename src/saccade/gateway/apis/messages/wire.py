"""The wire format of Anthropic's Messages. Source: Anthropic's API reference, version 2023-06-01."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from saccade.gateway.field_schemas import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_STOP_STRINGS,
    MAX_TOP_K,
    TOOL_NAME,
    CallId,
    Count,
    JsonSchema,
    StopText,
)
from saccade.gateway.media_parameters import LIMITS_OF_IMAGES, ImageLimits
from saccade.gateway.output.answer import MediaUsage, Usage
from saccade.gateway.unknown_fields import IN_MESSAGES

# Code checks some fields, with better errors; the schemas here are for the description of the API.
BLOCK_TYPES = ("text", "image", "document", "search_result", "thinking", "tool_use", "tool_result")
SKIPPED_TYPES = ("redacted_thinking", "tool_reference")
"""Blocks that no model here can read, and that hold no text: thinking that Anthropic encrypted, names of tools."""

BlockType = Annotated[str, Meta(extra_json_schema={"enum": [*BLOCK_TYPES, *SKIPPED_TYPES]})]
SourceType = Annotated[str, Meta(extra_json_schema={"enum": ["base64", "url", "file", "text", "content"]})]
MessageRole = Annotated[str, Meta(extra_json_schema={"enum": ["user", "assistant", "system"]})]
ToolName = Annotated[str, Meta(extra_json_schema={"pattern": f"^{TOOL_NAME}$"})]
SchemaSchema = {"properties": {"type": {"type": "string", "enum": ["object"]}}}
MAX_EDITS = 64
InputSchema = Annotated[dict[str, Any], Meta(extra_json_schema=SchemaSchema)]
FormatType = Annotated[str, Meta(extra_json_schema={"enum": ["json_schema"]})]
ChoiceType = Annotated[str, Meta(extra_json_schema={"enum": ["auto", "any", "tool", "none"]})]


OF_BLOCKS = {
    "text": ("text",),
    "image": ("source", *LIMITS_OF_IMAGES),
    "document": ("source", "title", "context", *LIMITS_OF_IMAGES),
    "search_result": ("source", "title", "content"),
    "thinking": ("thinking", "signature"),
    "tool_use": ("input",),
    "tool_result": ("tool_use_id", "content", "is_error"),
}
OF_ANSWERS = frozenset({"container", "model", "stop_details", "stop_reason", "stop_sequence", "usage"})
"""What an answer has besides its content; it may be sent back whole."""

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class Source(ImageLimits, frozen=True):
    """An image or a document: base64 *data*, a *url*, or the *file_id* of an uploaded file.

    For the type `text`, *data* is a document's text; for the type `content`, *content* holds its texts and images.
    """

    type: SourceType
    media_type: Annotated[str, Meta(max_length=64)] | None = None
    data: str | None = None
    url: str | None = None
    file_id: str | None = None
    content: "str | Annotated[list[Block], Meta(max_length=MAX_PARTS)] | None" = None
    of_types: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "base64": ("data",),
        "content": ("content",),
        "text": ("data",),
        "url": ("url",),
        "file": ("file_id",),
    }
    without_effect: ClassVar[frozenset[str]] = IN_MESSAGES


class Block(ImageLimits, frozen=True):
    """A piece of a message; its *type* determines its fields.

    A document may have a *title* and a *context*. A search result has a *title* too, and its *source* is a text. The
    *signature* of thinking and the *is_error* of a tool result are accepted but have no effect.
    """

    type: BlockType
    text: str | None = None
    source: Source | str | None = None
    title: str | None = None
    context: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: CallId | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: CallId | None = None
    content: "str | Annotated[list[Block], Meta(max_length=MAX_PARTS)] | None" = None
    is_error: bool | None = None
    of_types: ClassVar[Mapping[str, tuple[str, ...]]] = OF_BLOCKS
    without_effect: ClassVar[frozenset[str]] = IN_MESSAGES


Content = str | Annotated[list[Block], Meta(max_length=MAX_PARTS)]


class Message(Struct, frozen=True):
    """One turn. An assistant's *content* may be empty, null or missing."""

    role: MessageRole
    content: Content | None = None
    without_effect: ClassVar[frozenset[str]] = IN_MESSAGES | OF_ANSWERS


class Tool(Struct, frozen=True):
    """A function that the answer may call, with the JSON schema of its arguments.

    A tool with a *type* other than "custom" is one of Anthropic's own, and is left out. *defer_loading* has no effect.
    """

    name: ToolName | None = None
    input_schema: InputSchema | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    of_types: ClassVar[Mapping[str, tuple[str, ...]]] = {"": (), "custom": ()}
    without_effect: ClassVar[frozenset[str]] = frozenset({"allowed_callers", "cache_control", "eager_input_streaming"})


class ToolChoice(Struct, frozen=True):
    """Says whether the answer may or must call tools. If the type is "tool", *name* is the tool to call."""

    type: ChoiceType
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, frozen=True):
    """Says whether the model reasons first; *display* "omitted" leaves the reasoning out of the answer."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Struct, frozen=True):
    """The format of the answer: JSON that matches a schema."""

    type: FormatType
    schema: JsonSchema | UnsetType = UNSET


class OutputConfig(Struct, frozen=True):
    """Settings for the answer. An *effort* has no effect: `thinking` sets whether a model reasons."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class Keep(Struct, frozen=True):
    """How many of the newest turns or calls an edit leaves unchanged."""

    type: str | None = None
    value: Annotated[int, Meta(ge=0)] | None = None


class Edit(Struct, frozen=True):
    """Says what Anthropic's servers would remove from a long conversation; with *keep* "all", they remove nothing."""

    type: str
    keep: Keep | str | None = None
    of_types: ClassVar[Mapping[str, tuple[str, ...]]] = {}


class ContextManagement(Struct, frozen=True):
    """Edits to the conversation; this server makes none of them."""

    edits: Annotated[list[Edit], Meta(max_length=MAX_EDITS)] | None = None


Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]


class CountRequest(Struct, frozen=True, kw_only=True):
    """The body of POST /v1/messages/count_tokens.

    *output_format* is the older name for the format in *output_config*.
    """

    model: str | None = None
    messages: Messages
    system: Content | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    output_format: OutputFormat | None = None


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """The body of POST /v1/messages. Names and meanings are Anthropic's; the bounds are the same as for chats."""

    max_tokens: Count
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOP_K)] | None = None
    stop_sequences: Annotated[list[StopText], Meta(max_length=MAX_STOP_STRINGS)] | None = None


class CountAnswer(Struct, frozen=True):
    """The number of tokens in a chat, images included."""

    input_tokens: int


class MessageUsage(Struct, frozen=True):
    """A request's token counts. *input_tokens* counts the prompt tokens that were not in the prefix cache.

    *input_tokens_details* is not in Anthropic's API; only prompts with images have it.
    """

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0
    input_tokens_details: MediaUsage | UnsetType = UNSET


class TextBlock(Struct, frozen=True, tag="text"):
    """Text in an answer."""

    text: str


class ThinkingBlock(Struct, frozen=True, tag="thinking"):
    """Reasoning before an answer; it is not signed."""

    thinking: str
    signature: str = ""


class ToolUseBlock(Struct, frozen=True, tag="tool_use"):
    """A tool call for the client to make; its result refers to *id*. *input* is a JSON object."""

    id: str
    name: str
    input: Raw


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessageAnswer(Struct, frozen=True, kw_only=True, tag="message"):
    """A complete answer, or the beginning of a streamed one, whose content is still empty."""

    id: str
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    role: Literal["assistant"] = "assistant"


def usage_of(usage: Usage) -> MessageUsage:
    """Return *usage* in Anthropic's format."""
    prompt = usage.prompt_tokens_details
    media = MediaUsage(image_tokens=prompt.image_tokens, video_tokens=prompt.video_tokens, images=prompt.images)
    return MessageUsage(
        usage.prompt_tokens - prompt.cached_tokens,
        usage.completion_tokens,
        prompt.cached_tokens,
        input_tokens_details=media if prompt.images else UNSET,
    )

"""Anthropic's wire format: answers, events and errors. Source: the API reference of Anthropic's Messages."""

from typing import Final, Literal

import msgspec
from msgspec import Raw, Struct

from saccade.errors import SaccadeError
from saccade.gateway.openai.answers import Usage


class CountAnswer(Struct, frozen=True):
    """How many tokens a chat has, those of its images included."""

    input_tokens: int


class MessageUsage(Struct, frozen=True):
    """Tokens of a request. *input_tokens* are those of the prompt that were not found in the prefix cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class TextBlock(Struct, frozen=True, tag="text"):
    """Text of an answer."""

    text: str


class ThinkingBlock(Struct, frozen=True, tag="thinking"):
    """Reasoning before an answer; it is not signed."""

    thinking: str
    signature: str = ""


class ToolUseBlock(Struct, frozen=True, tag="tool_use"):
    """A call of a tool that the client is to make; the result names *id*. *input* is a JSON object."""

    id: str
    name: str
    input: Raw


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageAnswer(Struct, frozen=True, kw_only=True, tag="message"):
    """A whole answer, and the beginning of a streamed one, which has no content yet."""

    id: str
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    role: Literal["assistant"] = "assistant"


class MessageStart(Struct, frozen=True, tag="message_start"):
    """The first event of a stream."""

    message: MessageAnswer


class ContentBlockStart(Struct, frozen=True, tag="content_block_start"):
    """A block begins; its texts and the input of a call are still empty."""

    index: int
    content_block: AnswerBlock


class TextDelta(Struct, frozen=True, tag="text_delta"):
    """What a block of text grows by."""

    text: str


class ThinkingDelta(Struct, frozen=True, tag="thinking_delta"):
    """What a block of reasoning grows by."""

    thinking: str


class InputJsonDelta(Struct, frozen=True, tag="input_json_delta"):
    """The JSON of a call's input, always whole."""

    partial_json: str


class ContentBlockDelta(Struct, frozen=True, tag="content_block_delta"):
    """A block grows."""

    index: int
    delta: TextDelta | ThinkingDelta | InputJsonDelta


class ContentBlockStop(Struct, frozen=True, tag="content_block_stop"):
    """A block is whole."""

    index: int


class StopDelta(Struct, frozen=True):
    """Why the answer ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, frozen=True, tag="message_delta"):
    """The answer is whole; *usage* is that of all of it."""

    delta: StopDelta
    usage: MessageUsage


class MessageStop(Struct, frozen=True, tag="message_stop"):
    """The last event of a stream."""


class MessagesErrorDetail(Struct, frozen=True):
    """What went wrong: *type* follows from the HTTP status; *param* and *code* are those of all errors here."""

    type: str
    message: str
    param: str | None
    code: str


class MessagesError(Struct, frozen=True, tag="error"):
    """The body of an answer that is not a 2xx, and the last event of a stream that failed."""

    error: MessagesErrorDetail


ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_of(error: SaccadeError) -> MessagesError:
    """Return what a client is told of *error*."""
    kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return MessagesError(MessagesErrorDetail(kind, error.message, error.param, error.code))


def usage_of(usage: Usage) -> MessageUsage:
    """Return *usage* as Anthropic counts."""
    num_cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(usage.prompt_tokens - num_cached, usage.completion_tokens, num_cached)


def event(value: Struct) -> bytes:
    """Return *value* as a server-sent event whose name is its type."""
    tag = value.__struct_config__.tag
    return f"event: {tag}\ndata: ".encode() + msgspec.json.encode(value) + b"\n\n"

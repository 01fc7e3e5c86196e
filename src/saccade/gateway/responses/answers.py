"""The wire format of OpenAI's Responses: answers. Source: the API reference of OpenAI and the types of its SDK."""

from typing import Any, Literal

from msgspec import Raw, Struct

from saccade.gateway.openai.answers import Usage
from saccade.gateway.responses.requests import FunctionTool

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(Struct, frozen=True, tag="output_text"):
    """Text of an answer."""

    text: str
    annotations: list[None] = []
    logprobs: list[None] = []


class ReasoningText(Struct, frozen=True, tag="reasoning_text"):
    """Text of the reasoning before an answer."""

    text: str


class MessageItem(Struct, frozen=True, tag="message"):
    """What the answer says."""

    id: str
    content: list[OutputText]
    status: Status
    role: Literal["assistant"] = "assistant"


class ReasoningItem(Struct, frozen=True, tag="reasoning"):
    """The reasoning before an answer, as it is: no summary is made."""

    id: str
    content: list[ReasoningText]
    status: Status
    summary: list[None] = []


class FunctionCallItem(Struct, frozen=True, tag="function_call"):
    """A call of a function that the client is to make; the item with its result names *call_id*."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: Status


OutputItem = MessageItem | ReasoningItem | FunctionCallItem


class InputTokensDetails(Struct, frozen=True):
    """How many tokens of the prompt were found in the prefix cache; what is written to it is not counted."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct, frozen=True):
    """How many tokens of the answer are reasoning."""

    reasoning_tokens: int


class ResponseUsage(Struct, frozen=True):
    """Tokens of a request; *input_tokens* includes those of images."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Struct, frozen=True):
    """Why an answer is cut."""

    reason: Literal["max_output_tokens"]


class ResponseError(Struct, frozen=True):
    """Why an answer failed after it had begun."""

    code: str
    message: str


class ReasoningConfig(Struct, frozen=True):
    """What the request says of the reasoning."""

    effort: str | None
    summary: str | None


class TextFormat(Struct, frozen=True):
    """What the request says of the answer's text, in JSON."""

    format: Raw


class Response(Struct, frozen=True, kw_only=True):
    """An answer; what the request says of it is repeated."""

    id: str
    created_at: int
    model: str
    status: Status
    output: list[OutputItem]
    usage: ResponseUsage | None
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ReasoningConfig
    store: bool
    temperature: float | None
    text: TextFormat
    tool_choice: str | dict[str, Any]
    tools: list[FunctionTool]
    top_p: float | None
    background: bool = False
    truncation: Literal["disabled"] = "disabled"
    object: Literal["response"] = "response"


class DeletedResponse(Struct, frozen=True):
    """A response that is no longer kept."""

    id: str
    deleted: bool = True
    object: Literal["response"] = "response"


def usage_of(usage: Usage) -> ResponseUsage:
    """Return *usage* as Responses spell it."""
    return ResponseUsage(
        usage.prompt_tokens,
        InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
        usage.completion_tokens,
        OutputTokensDetails(usage.completion_tokens_details.reasoning_tokens),
        usage.total_tokens,
    )

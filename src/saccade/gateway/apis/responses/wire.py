"""The wire format of OpenAI's Responses. Sources: OpenAI's API reference and the types in its SDK."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from saccade.gateway.field_schemas import (
    MAX_CHARACTERS,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_STOP_CHARACTERS,
    CallId,
    Count,
    Effort,
    JsonSchema,
    Priority,
    Refused,
)
from saccade.gateway.media_parameters import LIMITS_OF_IMAGES, ImageLimits
from saccade.gateway.output.answer import MediaUsage, Usage
from saccade.gateway.unknown_fields import IN_MESSAGES
from saccade.models.family import Detail

# Code checks some fields, with better errors; the schemas here are for the description of the API.
PART_TYPES = ("input_text", "input_image", "input_file", "output_text", "refusal", "reasoning_text")
CALL_TYPES = ("function_call", "custom_tool_call", "local_shell_call")
RESULT_TYPES = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
ITEM_TYPES = ("message", "reasoning", *CALL_TYPES, *RESULT_TYPES, "additional_tools")
SKIPPED_TYPES = (
    "apply_patch_call",
    "apply_patch_call_output",
    "code_interpreter_call",
    "compaction",
    "compaction_summary",
    "compaction_trigger",
    "computer_call",
    "computer_call_output",
    "context_compaction",
    "file_search_call",
    "ghost_snapshot",
    "image_generation_call",
    "item_reference",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_call",
    "mcp_list_tools",
    "shell_call",
    "shell_call_output",
    "tool_search_call",
    "tool_search_output",
    "web_search_call",
)
"""Items of tools that a server runs, and of settings of OpenAI's service: no chat template writes them."""
PartType = Annotated[str, Meta(extra_json_schema={"enum": list(PART_TYPES)})]
ItemType = Annotated[str, Meta(extra_json_schema={"enum": [*ITEM_TYPES, *SKIPPED_TYPES]})]
ItemRole = Annotated[str, Meta(extra_json_schema={"enum": ["user", "assistant", "system", "developer"]})]
ToolSchema = {"properties": {"type": {"type": "string"}}, "required": ["type"]}


ToolChoice = Annotated[str, Meta(extra_json_schema={"enum": ["auto", "none", "required"]})]
ResponseId = Annotated[str, Meta(min_length=1, max_length=128)]
Metadata = Annotated[dict[str, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]
LogprobsSchema = {"enum": [0, None]}
FORMAT_TYPES = ("text", "json_object", "json_schema")
FormatType = Annotated[str, Meta(extra_json_schema={"enum": list(FORMAT_TYPES)})]
NoLogprobs = Annotated[int, Meta(extra_json_schema=LogprobsSchema)]
OF_TEXTS = ("text",)
OF_PARTS = {
    "input_text": OF_TEXTS,
    "output_text": OF_TEXTS,
    "reasoning_text": OF_TEXTS,
    "refusal": ("refusal",),
    "input_image": ("image_url", "file_id", *LIMITS_OF_IMAGES),
    "input_file": ("file_id", "file_data", "file_url", *LIMITS_OF_IMAGES),
}
OF_CALLS = ("call_id", "namespace")
OF_RESULTS = ("call_id", "output")
OF_ITEMS = {
    "": ("content",),
    "message": ("content",),
    "reasoning": ("content",),
    "function_call": (*OF_CALLS, "arguments"),
    "custom_tool_call": (*OF_CALLS, "input"),
    "local_shell_call": ("call_id", "action"),
    **dict.fromkeys(RESULT_TYPES, OF_RESULTS),
    "additional_tools": ("tools",),
}
Status = Literal["in_progress", "completed", "incomplete", "failed"]


class ToolFields(Struct, frozen=True):
    """The tool fields that apis.responses.tools reads."""

    type: str
    name: str
    description: str
    parameters: Raw
    strict: bool
    format: Raw
    tools: "list[ToolFields]"
    of_types: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "function": ("parameters", "strict"),
        "custom": ("format",),
        "namespace": ("tools",),
    }
    without_effect: ClassVar[frozenset[str]] = frozenset({"cache_control", "defer_loading"})


# Checked by code: each type has its own fields.
Tools = list[Annotated[dict[str, Any], Meta(extra_json_schema=ToolSchema, extra={"struct": ToolFields})]]


class Part(ImageLimits, frozen=True):
    """A piece of an item: text under several names, an image, or a file; its *type* determines its fields.

    *filename* matters only for text files; it has no effect for images and PDFs.
    """

    type: PartType
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    file_id: str | None = None
    file_data: str | None = None
    file_url: str | None = None
    filename: str | None = None
    detail: Detail | None = None
    of_types: ClassVar[Mapping[str, tuple[str, ...]]] = OF_PARTS
    without_effect: ClassVar[frozenset[str]] = IN_MESSAGES | {"filename"}


Content = str | Annotated[list[Part], Meta(max_length=MAX_PARTS)]


class LocalShellAction(Struct, frozen=True, tag="exec"):
    """A command to run on the client's machine."""

    command: list[str]
    env: dict[str, str] = {}
    timeout_ms: int | None = None
    working_directory: str | None = None
    user: str | None = None
    without_effect: ClassVar[frozenset[str]] = frozenset({"type"})


class Item(Struct, frozen=True):
    """A turn of a conversation, or a part of one; its *type* determines its fields.

    *status* and *encrypted_content* are accepted but have no effect. *id* matters only in a `local_shell_call_output`
    that has no *call_id*; it then serves as the *call_id*.
    """

    type: ItemType = "message"
    role: ItemRole | None = None
    content: Content | None = None
    call_id: CallId | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | dict[str, Any] | None = None
    input: str | None = None
    action: Annotated[dict[str, Any], Meta(extra={"struct": LocalShellAction})] | None = None
    output: Content | dict[str, Any] | None = None
    tools: Tools | None = None
    id: str | None = None
    status: str | None = None
    encrypted_content: str | None = None
    of_types: ClassVar[Mapping[str, tuple[str, ...]]] = OF_ITEMS
    without_effect: ClassVar[frozenset[str]] = IN_MESSAGES | {"role"}


class Format(Struct, frozen=True):
    """The format of the answer: text, any JSON object, or JSON that matches *schema*.

    A keyword that cannot be enforced is dropped, unless the schema is *strict*; then the request is refused.
    """

    type: FormatType
    name: Annotated[str, Meta(max_length=MAX_STOP_CHARACTERS)] | None = None
    schema: JsonSchema | UnsetType = UNSET
    strict: bool | None = None
    description: str | None = None
    json_schema: Refused = UNSET
    value: Refused = UNSET


class TextConfig(Struct, frozen=True):
    """Settings for the answer's text."""

    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Struct, frozen=True):
    """Says whether the model reasons first. Answers contain the reasoning itself, never a summary."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None


class ResponseRequest(Struct, frozen=True, kw_only=True):
    """The body of POST /v1/responses. Names and meanings are OpenAI's; the bounds are the same as for chats.

    *include* has no effect, since it concerns tools that the server runs; log probabilities are refused. *priority*,
    which vLLM accepts too, means the same as in chats.
    """

    model: str | None = None
    input: (
        Annotated[str, Meta(max_length=MAX_CHARACTERS)]
        | Annotated[list[Item], Meta(min_length=1, max_length=MAX_MESSAGES)]
    )
    instructions: str | None = None
    previous_response_id: ResponseId | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_logprobs: NoLogprobs | None = None
    tools: Tools | None = None
    truncation: Literal["auto", "disabled"] | None = None
    tool_choice: ToolChoice | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    metadata: Metadata | None = None
    include: Annotated[list[Annotated[str, Meta(max_length=64)]], Meta(max_length=16)] | None = None
    priority: Priority | None = None


class OutputText(Struct, frozen=True, tag="output_text"):
    """Text in an answer."""

    text: str
    annotations: list[None] = []
    logprobs: list[None] = []


class ReasoningText(Struct, frozen=True, tag="reasoning_text"):
    """Text in the reasoning before an answer."""

    text: str


class MessageItem(Struct, frozen=True, tag="message"):
    """The answer's content."""

    id: str
    content: list[OutputText]
    status: Status
    role: Literal["assistant"] = "assistant"


class ReasoningItem(Struct, frozen=True, tag="reasoning"):
    """The reasoning before an answer, without a summary."""

    id: str
    content: list[ReasoningText]
    status: Status
    summary: list[None] = []


class FunctionCallItem(Struct, frozen=True, tag="function_call"):
    """A function call for the client to make; the item with its result refers to *call_id*."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: Status
    namespace: str | UnsetType = UNSET


class CustomToolCallItem(Struct, frozen=True, tag="custom_tool_call"):
    """A call to a custom tool; its *input* is text."""

    id: str
    call_id: str
    name: str
    input: str
    status: Status
    namespace: str | UnsetType = UNSET


class LocalShellCallItem(Struct, frozen=True, tag="local_shell_call"):
    """A command for the client to run."""

    id: str
    call_id: str
    action: LocalShellAction
    status: Status


OutputItem = MessageItem | ReasoningItem | FunctionCallItem | CustomToolCallItem | LocalShellCallItem


class InputTokensDetails(MediaUsage, frozen=True):
    """The prompt's tokens in detail, as in chats. Tokens that are written to the prefix cache are not counted."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct, frozen=True):
    """How many of the answer's tokens are reasoning."""

    reasoning_tokens: int


class ResponseUsage(Struct, frozen=True):
    """A request's token counts; *input_tokens* includes image tokens."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Struct, frozen=True):
    """Why an answer is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseError(Struct, frozen=True):
    """Why an answer failed after it had begun."""

    code: str
    message: str


class ReasoningConfig(Struct, frozen=True):
    """The request's reasoning settings."""

    effort: str | None
    summary: str | None


class TextFormat(Struct, frozen=True):
    """The format that the request sets for the answer's text, as JSON."""

    format: Raw


class Response(Struct, frozen=True, kw_only=True):
    """An answer; it repeats the settings of its request."""

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
    tools: list[dict[str, Any]]
    top_p: float | None
    background: bool = False
    truncation: Literal["disabled"] = "disabled"
    object: Literal["response"] = "response"


class DeletedResponse(Struct, frozen=True):
    """Confirms that a response was deleted."""

    id: str
    deleted: bool = True
    object: Literal["response"] = "response"


def usage_of(usage: Usage) -> ResponseUsage:
    """Return *usage* in the format of Responses."""
    return ResponseUsage(
        usage.prompt_tokens,
        InputTokensDetails(**msgspec.structs.asdict(usage.prompt_tokens_details)),
        usage.completion_tokens,
        OutputTokensDetails(usage.completion_tokens_details.reasoning_tokens),
        usage.total_tokens,
    )

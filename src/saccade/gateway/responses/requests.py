"""The wire format of OpenAI's Responses: requests. Source: the API reference of OpenAI and the types of its SDK."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from saccade.gateway.openai.requests import (
    MAX_CHARACTERS,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_STOP_CHARACTERS,
    MAX_TOOLS,
    TOOL_NAME,
    CallId,
    Count,
    Detail,
    Effort,
    JsonSchema,
)

# Some fields are checked by code, with better errors; the schemas here are for the description of the API.
PART_TYPES = ("input_text", "input_image", "output_text", "refusal", "reasoning_text")
ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")
PartType = Annotated[str, Meta(extra_json_schema={"enum": list(PART_TYPES)})]
ItemType = Annotated[str, Meta(extra_json_schema={"enum": list(ITEM_TYPES)})]
ItemRole = Annotated[str, Meta(extra_json_schema={"enum": ["user", "assistant", "system", "developer"]})]
ToolType = Annotated[str, Meta(extra_json_schema={"enum": ["function"]})]
ToolName = Annotated[str, Meta(extra_json_schema={"pattern": f"^{TOOL_NAME}$"})]
ParametersSchema = {"properties": {"type": {"type": "string", "enum": ["object"]}}}
Parameters = Annotated[dict[str, Any], Meta(extra_json_schema=ParametersSchema)]
ToolChoice = Annotated[str, Meta(extra_json_schema={"enum": ["auto", "none", "required"]})]
ResponseId = Annotated[str, Meta(min_length=1, max_length=128)]
Metadata = Annotated[dict[str, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]
LogprobsSchema = {"enum": [0, None]}
NoLogprobs = Annotated[int, Meta(extra_json_schema=LogprobsSchema)]


class Part(Struct, frozen=True):
    """A piece of an item: text under several names, or an image; which fields it has follows from its *type*."""

    type: PartType
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    file_id: str | None = None
    detail: Detail | None = None


Content = str | Annotated[list[Part], Meta(max_length=MAX_PARTS)]


class Item(Struct, frozen=True):
    """A turn of a conversation, or a part of one; which fields it has follows from its *type*.

    *id*, *status* and *encrypted_content* are accepted and have no effect.
    """

    type: ItemType = "message"
    role: ItemRole | None = None
    content: Content | None = None
    call_id: CallId | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content | None = None
    id: str | None = None
    status: str | None = None
    encrypted_content: str | None = None


class FunctionTool(Struct, frozen=True):
    """A function that the answer may call."""

    name: ToolName | None = None
    parameters: Parameters | None = None
    description: str | None = None
    strict: bool | None = None
    type: ToolType = "function"


class Format(Struct, frozen=True):
    """What the answer is: text, any JSON object, or JSON by *schema*; of a *strict* one nothing is dropped."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Meta(max_length=MAX_STOP_CHARACTERS)] | None = None
    schema: JsonSchema | UnsetType = UNSET
    strict: bool | None = None
    description: str | None = None


class TextConfig(Struct, frozen=True):
    """What the answer's text is like."""

    format: Format | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Struct, frozen=True):
    """Whether the answer reasons first; a summary is never made: answers have the reasoning itself."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseRequest(Struct, frozen=True, kw_only=True):
    """The body of POST /v1/responses. Names and meanings are OpenAI's; bounds are those of chats.

    What *include* asks for is about tools that the server runs and has no effect, but for log probabilities.
    """

    model: str
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
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_logprobs: NoLogprobs | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    metadata: Metadata | None = None
    include: Annotated[list[Annotated[str, Meta(max_length=64)]], Meta(max_length=16)] | None = None

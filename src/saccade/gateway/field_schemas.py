"""Bounds and JSON schemas for the fields that clients send."""

from typing import Annotated, Any

from msgspec import Meta, Raw, UnsetType

from saccade.gateway.media_parameters import (
    MediaIoSchema,
    ProcessorSchema,
)
from saccade.protocol.request import MAX_PRIORITY

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_SEED = 2**63 - 1
MAX_TOP_K = 2**31 - 1
MAX_CHARACTERS = 4 * 2**20
MAX_TOKENS = 2**20
MAX_TOKEN_ID = 2**31 - 1
MAX_THINKING_TOKENS = 2**31 - 1
NO_BUDGET = -1
"""As `thinking_token_budget`: the reasoning has no limit of its own."""

BIAS_KEY = "^(0|[1-9][0-9]{0,9})$"
MAX_STOP_TOKEN_IDS = 256
MAX_BIASES = 1024
MAX_TOP_LOGPROBS = 20
MAX_SALT_CHARACTERS = 1024
MAX_GRAMMAR_CHARACTERS = 64 * 2**10
MAX_CHOICES = 1024
MAX_MESSAGES = 2048
MAX_PARTS = 4096
"""In all messages of a request together."""

MAX_CALLS = 256
"""Calls of tools in one message."""

MAX_CALL_ID = 1024
"""OpenAI allows 64 characters; proxies of other models use almost a thousand, and Kimi's ids contain a tool's name."""

MAX_TOOL_NAME = 128
"""Anthropic's; OpenAI's is 64."""

TOOL_NAME = f"[a-zA-Z0-9_.-]{{1,{MAX_TOOL_NAME}}}"
IMAGE_PART = '{"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,..."}}'
"""OpenAI's form of an image, for errors about other forms."""

VIDEO_PART = '{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,..."}}'
"""vLLM's form of a video, for errors about other forms."""
PART_TYPES = ("text", "image_url", "video_url", "image", "video", "file", "refusal")
# Code checks some fields, with better errors; the schemas here are for the description of the API.
Role = Annotated[str, Meta(extra_json_schema={"enum": ["system", "developer", "user", "assistant", "tool"]})]
PartType = Annotated[str, Meta(extra_json_schema={"enum": list(PART_TYPES)})]
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
Effort = Annotated[str, Meta(extra_json_schema={"enum": list(EFFORTS)})]
SwitchSchema = {"additionalProperties": {"type": ["boolean", "number", "string", "null"], "maxLength": 256}}
Switches = Annotated[dict[str, Any], Meta(extra_json_schema=SwitchSchema)]
MediaIoKwargs = Annotated[dict[str, Any], Meta(extra_json_schema=MediaIoSchema)]
ProcessorKwargs = Annotated[dict[str, Any], Meta(extra_json_schema=ProcessorSchema)]
StopText = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Count = Annotated[int, Meta(ge=1)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Priority = Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
GrammarText = Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]
OtherGrammar = Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARACTERS)]
Choice = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Choices = Annotated[list[Choice], Meta(min_length=1, max_length=MAX_CHOICES)]
# A schema stays raw: a limited child reads it.
JsonSchema = Annotated[Raw, Meta(extra_json_schema={"type": ["object", "boolean", "string", "null"]})]
FORMAT_TYPES = ("text", "json_object", "json_schema", "json", "regex")
FormatType = Annotated[str, Meta(extra_json_schema={"enum": list(FORMAT_TYPES)})]
BiasSchema = {"propertyNames": {"pattern": BIAS_KEY}}
FunctionSchema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": f"^{TOOL_NAME}$"},
        "description": {"type": ["string", "null"]},
        "parameters": {
            "type": ["object", "null"],
            "properties": {"type": {"type": "string", "enum": ["object"]}},
        },
        "strict": {"type": ["boolean", "null"]},
    },
    "required": ["name"],
    "additionalProperties": False,
}
ToolSchema = {
    "properties": {"type": {"type": "string", "enum": ["function"]}, "function": FunctionSchema},
    "required": ["type", "function"],
    "additionalProperties": False,
}
# Checked by code; passed to chat templates as they are.
Tools = list[Annotated[dict[str, Any], Meta(extra_json_schema=ToolSchema)]]
ToolChoice = Annotated[str, Meta(extra_json_schema={"enum": ["auto", "none", "required"]})]
CallId = Annotated[str, Meta(max_length=MAX_CALL_ID)]
# A field that is refused unless it is empty is not decoded.
Refused = Annotated[Raw | UnsetType, Meta(extra_json_schema={"type": "null"})]

"""ChatRequest, the internal request that every API's body becomes.

Its field names are those of OpenAI's API, which clients of every server know.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from saccade.gateway.field_schemas import (
    MAX_BIASES,
    MAX_CALLS,
    MAX_CHARACTERS,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_SALT_CHARACTERS,
    MAX_SEED,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_THINKING_TOKENS,
    MAX_TOKENS,
    MAX_TOP_K,
    NO_BUDGET,
    Bias,
    BiasSchema,
    CallId,
    Choices,
    Count,
    Effort,
    FormatType,
    GrammarText,
    JsonSchema,
    MediaIoKwargs,
    OtherGrammar,
    PartType,
    Penalty,
    Priority,
    ProcessorKwargs,
    Refused,
    Role,
    StopText,
    Switches,
    TokenId,
    ToolChoice,
    Tools,
    TopLogprobs,
)
from saccade.gateway.media_parameters import (
    LIMITS,
    LIMITS_OF_IMAGES,
    FileSchema,
    ImageLimits,
    ImageSchema,
    MediaLimits,
    VideoSchema,
)
from saccade.gateway.unknown_fields import IN_MESSAGES
from saccade.models.family import Detail
from saccade.protocol.request import MAX_NUM_SAMPLES

OF_PARTS = {
    "text": ("text",),
    "refusal": ("refusal",),
    "image_url": ("image_url", "detail", *LIMITS_OF_IMAGES),
    "image": ("detail", *LIMITS_OF_IMAGES),
    "video_url": ("video_url", *LIMITS),
    "video": LIMITS,
    "file": ("detail", *LIMITS_OF_IMAGES),
}


class ImageUrl(ImageLimits, frozen=True):
    """The URL of an image.

    With *detail* "low" the model sees a smaller image; with any other value, the model's default size.
    """

    url: str
    detail: Detail | None = None
    without_effect: ClassVar[frozenset[str]] = IN_MESSAGES


class VideoUrl(MediaLimits, frozen=True):
    """The URL of a video, or the URLs of frames that the client has sampled."""

    url: str | list[str]
    without_effect: ClassVar[frozenset[str]] = IN_MESSAGES


class OtherMedia(MediaLimits, frozen=True, kw_only=True):
    """Media fields that other APIs have. None is ignored: each is refused unless it is empty or fits the part's type.

    Only parts may set the limits.
    """

    attachments: Refused = UNSET
    audio: Refused = UNSET
    audio_url: Refused = UNSET
    files: Refused = UNSET
    image: Annotated[Raw | UnsetType, Meta(extra_json_schema=ImageSchema, extra={"struct": ImageUrl})] = UNSET
    image_base64: Refused = UNSET
    image_data: Refused = UNSET
    image_embeds: Refused = UNSET
    image_urls: Refused = UNSET
    images: Refused = UNSET
    input_audio: Refused = UNSET
    input_image: Refused = UNSET
    media: Refused = UNSET
    video: Annotated[Raw | UnsetType, Meta(extra_json_schema=VideoSchema, extra={"struct": VideoUrl})] = UNSET
    videos: Refused = UNSET


class FileSource(ImageLimits, frozen=True):
    """An image, a PDF or a text file: either uploaded earlier as *file_id*, or sent as *file_data*, a data: URL.

    *filename* matters only for text files; it has no effect for images and PDFs. A text file has no *file_id*.
    """

    file_id: str | None = None
    file_data: str | None = None
    filename: str | None = None
    without_effect: ClassVar[frozenset[str]] = IN_MESSAGES


class ContentPart(OtherMedia, frozen=True):
    """A piece of a message: `text`, an `image_url` or `video_url`, or an image, PDF or text file as a `file`.

    A URL may be a string, or an object that contains it. Parts of type `image` or `video` have the URL in the field of
    the same name. A `refusal` part holds the text of a model's refusal. An image's *detail* is either here or
    in its object. *uuid* is accepted but has no effect, because an image is identified by its bytes.
    """

    type: PartType
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | str | None = None
    video_url: VideoUrl | list[str] | str | None = None
    uuid: str | None = None
    detail: Detail | None = None
    inline_data: Refused = UNSET
    source: Refused = UNSET
    # Read if the part's type is `file`.
    file: Annotated[Raw | UnsetType, Meta(extra_json_schema=FileSchema, extra={"struct": FileSource})] = UNSET
    of_types: ClassVar[Mapping[str, tuple[str, ...]]] = OF_PARTS
    without_effect: ClassVar[frozenset[str]] = IN_MESSAGES


class CalledFunction(Struct, frozen=True):
    """A function's name and its arguments, a JSON object as text."""

    name: str
    arguments: str
    without_effect: ClassVar[frozenset[str]] = IN_MESSAGES


class ToolCall(Struct, frozen=True):
    """A tool call in an earlier turn."""

    id: CallId
    function: CalledFunction
    type: Annotated[str, Meta(extra_json_schema={"enum": ["function"]})] = "function"
    without_effect: ClassVar[frozenset[str]] = IN_MESSAGES


class ChatMessage(OtherMedia, frozen=True):
    """One turn of a chat.

    In an assistant's turn, *reasoning_content* or *reasoning* is the reasoning before the content. An assistant's
    *content* may be null or missing; a *refusal* is text after it. Messages with the role `tool` answer an assistant's
    *tool_calls*; each has the *tool_call_id* of its call.
    """

    role: Role
    content: str | Annotated[list[ContentPart], Meta(max_length=MAX_PARTS)] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_CALLS)] | None = None
    tool_call_id: CallId | None = None
    image_url: Refused = UNSET
    file: Refused = UNSET
    video_url: Refused = UNSET
    function_call: Refused = UNSET
    without_effect: ClassVar[frozenset[str]] = IN_MESSAGES


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]


class StreamOptions(Struct, frozen=True):
    """Says whether a stream ends with the usage.

    With *continuous_usage_stats* too, every other event has the usage so far.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None

    @classmethod
    def usages(cls, options: "StreamOptions | None") -> tuple[bool, bool]:
        """Return whether the stream's last event has the usage, and whether every other event has the usage so far."""
        at_end = options is not None and bool(options.include_usage)
        return at_end, at_end and bool(options and options.continuous_usage_stats)


class SamplingFields(Struct, frozen=True, kw_only=True):
    """How to sample *n* answers. The names and meanings are OpenAI's and vLLM's.

    Until there are *min_tokens* tokens, *stop*, *stop_token_ids* and the model's own end tokens have no effect.
    """

    n: Annotated[int, Meta(ge=1, le=MAX_NUM_SAMPLES)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOP_K)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    # Logits are multiplied and divided by it: a factor beyond these bounds would make them overflow.
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=MAX_BIASES, extra_json_schema=BiasSchema)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_TOKENS)] | None = None
    seed: Annotated[int, Meta(ge=-MAX_SEED, le=MAX_SEED)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None


class JsonSchemaFormat(Struct, frozen=True):
    """A JSON schema; if *strict*, no keyword may be dropped. *name* and *description* have no effect."""

    name: Annotated[str, Meta(max_length=MAX_STOP_CHARACTERS)] | None = None
    schema: JsonSchema | UnsetType = UNSET
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(Struct, frozen=True):
    """The format of the answer in OpenAI's API: text, any JSON object, or JSON that matches a schema.

    Other servers' forms are accepted too. llama.cpp has the *schema* next to the type. TGI has a *value*, a schema or
    regular expression, with the types `json` and `regex`. structured_output.constraint reads all these forms.
    """

    type: FormatType
    json_schema: JsonSchemaFormat | None = None
    schema: JsonSchema | UnsetType = UNSET
    strict: bool | None = None
    value: JsonSchema | UnsetType = UNSET


class StructuredOutputs(Struct, frozen=True):
    """The format of the answer in vLLM's API: one of *json*, *regex*, *choice*, *grammar*, *json_object*."""

    json: JsonSchema | UnsetType = UNSET
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None
    structural_tag: Refused = UNSET
    whitespace_pattern: Refused = UNSET


class AnswerFields(SamplingFields, frozen=True, kw_only=True):
    """The fields that chats and completions share: how to sample, constrain, return and cache an answer.

    *cache_salt* separates this request's cache entries from those of other requests with the same API key.
    At most one of *response_format*, *structured_outputs*, the *guided_* fields, llama.cpp's *json_schema* and
    *grammar*, and SGLang's *json_schema*, *regex* and *ebnf* may constrain the answer.
    """

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: TopLogprobs | None = None
    return_token_ids: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT_CHARACTERS)] | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | UnsetType = UNSET
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None
    json_schema: JsonSchema | UnsetType = UNSET
    regex: OtherGrammar | None = None
    ebnf: OtherGrammar | None = None
    grammar: OtherGrammar | None = None


class ChatRequest(AnswerFields, frozen=True, kw_only=True):
    """The body of POST /v1/chat/completions. `known_parameters` lists other parameters that clients send.

    *chat_template* replaces the model's template if the operator allows it. *chat_template_kwargs* are the template's
    switches, *mm_processor_kwargs* limit all images and videos and may choose frames, and *media_io_kwargs* choose the
    frames of videos. If *include_reasoning* is false, the answer leaves out the reasoning; its tokens still count.
    *enable_thinking* and *reasoning_effort* set the template's switch for reasoning (see messages.py).
    *thinking_token_budget* limits the reasoning tokens; at the limit, the reasoning ends. No template obeys
    *verbosity*. With *continue_final_message*, the answer continues the text of the last message. If
    *add_generation_prompt* is false, the prompt ends after the messages. The answer may call *tools* unless
    *tool_choice* is "none". If *parallel_tool_calls* is false, it makes at most one call. With --scheduling-policy
    priority, requests with a lower *priority* begin first.
    """

    model: str | None = None
    messages: Messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    include_reasoning: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: Switches | None = None
    mm_processor_kwargs: ProcessorKwargs | None = None
    media_io_kwargs: MediaIoKwargs | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: Annotated[int, Meta(ge=NO_BUDGET, le=MAX_THINKING_TOKENS)] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    priority: Priority | None = None
    clamps_max_tokens: ClassVar[bool] = False
    """Whether an answer that asks for more tokens than the context has room for gets the room."""

    @property
    def needed_tokens(self) -> int:
        """How many answer tokens the context must have room for."""
        return 1 if self.clamps_max_tokens else self.max_answer_tokens or 1

    @property
    def max_answer_tokens(self) -> int | None:
        """The most tokens that the answer may have; None if the request sets no limit."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TokenizeRequest(Struct, frozen=True, kw_only=True):
    """The body of POST /tokenize: a *prompt* of plain text, or *messages* as in a chat."""

    model: str | None = None
    prompt: Annotated[str, Meta(max_length=MAX_CHARACTERS)] | None = None
    messages: Messages | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: Switches | None = None
    mm_processor_kwargs: ProcessorKwargs | None = None
    media_io_kwargs: MediaIoKwargs | None = None
    tools: Tools | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Effort | None = None

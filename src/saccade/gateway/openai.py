"""The OpenAI wire format, both ways."""

import re
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from saccade.errors import InvalidValue, UnsupportedParameter

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_SEED = 2**63 - 1
MAX_TOP_K = 2**31 - 1
MAX_CHARACTERS = 4 * 2**20
MAX_TOKENS = 2**20

T = TypeVar("T")

# Some fields are checked by hand, which explains more; the description of the API says all the same what they take.
Role = Annotated[str, Meta(extra_json_schema={"enum": ["system", "developer", "user", "assistant"]})]
PartType = Annotated[str, Meta(extra_json_schema={"enum": ["text", "image_url"]})]
SwitchSchema = {"additionalProperties": {"type": ["boolean", "number", "string", "null"], "maxLength": 256}}
Switches = Annotated[dict[str, Any], Meta(extra_json_schema=SwitchSchema)]
PixelsSchema = {"type": ["integer", "null"], "minimum": 1, "maximum": 2**31}
EdgesSchema = {
    "type": ["object", "null"],
    "properties": {"shortest_edge": PixelsSchema, "longest_edge": PixelsSchema},
    "additionalProperties": False,
}
ProcessorSchema = {
    "properties": {"min_pixels": PixelsSchema, "max_pixels": PixelsSchema, "size": EdgesSchema},
    "additionalProperties": False,
}
ProcessorKwargs = Annotated[dict[str, Any], Meta(extra_json_schema=ProcessorSchema)]
StopText = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Count = Annotated[int, Meta(ge=1)]


class ImageUrl(Struct, frozen=True):
    """Where a picture is; *detail* says in what size the model sees it, "auto" being the model's own."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None


class ContentPart(Struct, frozen=True):
    """A piece of a message: `text`, or `image_url` as an object or a plain string.

    *uuid* is taken and changes nothing: a picture is known by its bytes.
    """

    type: PartType
    text: str | None = None
    image_url: ImageUrl | str | None = None
    uuid: str | None = None


class ChatMessage(Struct, frozen=True):
    """One turn of a chat. An assistant's *reasoning_content*, or *reasoning*, is what it thought before its content."""

    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class StreamOptions(Struct, frozen=True):
    """What a stream carries besides the answer."""

    include_usage: bool | None = None


class ChatRequest(Struct, frozen=True, kw_only=True):
    """The body of POST /v1/chat/completions. Fields that are not named here are refused or ignored, see LATER.

    *chat_template_kwargs* are the switches of the model's chat template, *mm_processor_kwargs* limits for all pictures.
    Where *include_reasoning* is false, the answer leaves out what the model thought; its tokens count all the same.
    """

    model: str
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOP_K)] | None = None
    seed: Annotated[int, Meta(ge=-MAX_SEED, le=MAX_SEED)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: Switches | None = None
    mm_processor_kwargs: ProcessorKwargs | None = None
    user: str | None = None


class TokenizeRequest(Struct, frozen=True, kw_only=True):
    """The body of POST /tokenize: a *prompt*, taken as plain text, or *messages* as in a chat."""

    model: str | None = None
    prompt: Annotated[str, Meta(max_length=MAX_CHARACTERS)] | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: Switches | None = None
    mm_processor_kwargs: ProcessorKwargs | None = None


class TokenizeAnswer(Struct, frozen=True):
    """Token ids; pictures appear as the placeholders that the model sees."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeRequest(Struct, frozen=True, kw_only=True):
    """The body of POST /detokenize."""

    tokens: Annotated[list[Annotated[int, Meta(ge=0, le=2**31 - 1)]], Meta(max_length=MAX_TOKENS)]
    model: str | None = None


class DetokenizeAnswer(Struct, frozen=True):
    """The text of token ids."""

    prompt: str


class PromptTokensDetails(Struct, frozen=True):
    """*cached_tokens* of the prompt were not computed again."""

    cached_tokens: int = 0


class CompletionTokensDetails(Struct, frozen=True):
    """*reasoning_tokens* of the answer were thoughts, shown or not."""

    reasoning_tokens: int = 0


class Usage(Struct, frozen=True):
    """Tokens of a request; *prompt_tokens* counts what pictures became."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class AnswerMessage(Struct, frozen=True):
    """The model's turn. *content* is null where it ended while the model was thinking."""

    content: str | None
    reasoning_content: str | UnsetType = UNSET
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class Choice(Struct, frozen=True):
    """One answer."""

    message: AnswerMessage
    finish_reason: str
    index: int = 0
    logprobs: None = None


class ChatCompletion(Struct, frozen=True, kw_only=True):
    """A whole answer."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"


class Delta(Struct, frozen=True):
    """What a chunk adds: to the content, or to the reasoning before it."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChunkChoice(Struct, frozen=True):
    """The piece of an answer in a chunk; *finish_reason* is set on the last one."""

    delta: Delta
    finish_reason: str | None = None
    index: int = 0
    logprobs: None = None


class ChatCompletionChunk(Struct, frozen=True, kw_only=True):
    """One event of a streamed answer. *usage* is there where it was asked for, null in all but the last chunk."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class ModelCard(Struct, frozen=True):
    """A model that is served."""

    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "saccade"


class ModelList(Struct, frozen=True):
    """All models that are served."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class ErrorDetail(Struct, frozen=True):
    """What went wrong, for people and for programs."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(Struct, frozen=True):
    """Every answer that is not a 2xx."""

    error: ErrorDetail


LATER: Final[dict[str, tuple[object, ...]]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "cache_salt": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "enable_thinking": (),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "logprobs": (False,),
    "media_io_kwargs": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": ([], ["text"]),
    "n": (1,),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "separate_reasoning": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "stream_reasoning": (True,),
    "structured_outputs": (),
    "thinking": (),
    "thinking_budget": (),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
"""Fields that would change the answer and are not served yet, with the values, besides null, that change nothing."""

_DETAIL = re.compile(
    r"Expected `(?P<expected>[a-z0-9 |]+)`"
    r"(?P<limit> (?:of length )?(?:[<>]=?|==) [-0-9.e+]+)?"
    r"(?:, got `(?P<got>[a-z]+)`)?"
)
_MISSING = re.compile(r"Object missing required field `(?P<field>\w+)`")
_PATH = re.compile(r" - at `(?:key in )?\$\.?(?P<path>[^`]*)`")


def parse_chat(body: bytes) -> ChatRequest:
    """Return the chat request in *body*. Raises InvalidValue, and UnsupportedParameter for fields that come later."""
    _refuse_what_comes_later(body, ChatRequest)
    return parse(body, ChatRequest)


def parse_tokenize(body: bytes) -> TokenizeRequest:
    """Return the request for token ids in *body*. Raises as parse_chat does."""
    _refuse_what_comes_later(body, TokenizeRequest)
    return parse(body, TokenizeRequest)


def parse(body: bytes | msgspec.Raw, kind: type[T]) -> T:
    """Return the JSON in *body* as *kind*. Raises InvalidValue that names the field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidValue("The body is not valid JSON.") from error
    except RecursionError as error:
        raise InvalidValue("The body is nested too deeply.") from error


def _refuse_what_comes_later(body: bytes, kind: type[Struct]) -> None:
    fields = parse(body, dict[str, msgspec.Raw])
    for name in (LATER.keys() & fields.keys()) - set(kind.__struct_fields__):
        value = parse(fields[name], object)
        if value is not None and value not in LATER[name]:
            raise UnsupportedParameter(f"`{name}` is not served yet; leave it out.", name)


def _explain(complaint: str) -> InvalidValue:
    """Turn msgspec's complaint into our own sentence; only what matches a known form is taken over."""
    path = _PATH.search(complaint)
    param = (path["path"] if path else "") or None
    if missing := _MISSING.search(complaint):
        param = f"{param}.{missing['field']}" if param else missing["field"]
        return InvalidValue(f"`{param}` is missing.", param)
    name = f"`{param}`" if param else "The body"
    if (detail := _DETAIL.search(complaint)) is None:
        return InvalidValue(f"{name} has a value that is not accepted.", param)
    got = f", not {detail['got']}" if detail["got"] else ""
    return InvalidValue(f"{name} must be {detail['expected']}{detail['limit'] or ''}{got}.", param)

"""Reads the request bodies of POST /v1/completions."""

from functools import partial
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw

from saccade.errors import InvalidValue, UnsupportedParameter
from saccade.gateway.apis.chat_endpoint import FieldNames, Format, ReadBody
from saccade.gateway.apis.completions.batch import CompletionBatch
from saccade.gateway.apis.completions.writer import CompletionEvents, CompletionObject, JoinedAnswers
from saccade.gateway.chat import PlainPrompt
from saccade.gateway.chat_request import AnswerFields, ChatRequest
from saccade.gateway.field_schemas import MAX_CHARACTERS, MAX_TOKENS, NO_BUDGET, Count, Priority, TokenId, TopLogprobs
from saccade.gateway.json_body import decode
from saccade.gateway.known_parameters import LATER
from saccade.gateway.parameters import Body, ParameterReader, check_stream
from saccade.gateway.server.events import error_event
from saccade.json_counts import num_items
from saccade.protocol.request import MAX_NUM_SAMPLES

DEFAULT_MAX_TOKENS: Final = 16
"""OpenAI's default."""

OF_CHATS: Final = ("messages", "tools", "tool_choice", "chat_template", "thinking_token_budget")
NOT_SERVED: Final[dict[str, tuple[object, ...]]] = {
    **{name: harmless for name, harmless in LATER.items() if name not in ("best_of", "echo")},
    **dict.fromkeys(OF_CHATS, ([], "none", NO_BUDGET)),
    "add_special_tokens": (True,),
    "continue_final_message": (False,),
    "prompt_embeds": ([],),
    "suffix": ("",),
}
"""Unsupported parameters that would change the answer, with the values, besides null, that change nothing."""

_Ids = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PromptSchema = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_NUM_SAMPLES},
        _Ids,
        {"type": "array", "items": _Ids, "minItems": 1, "maxItems": MAX_NUM_SAMPLES},
    ]
}
_Text = Annotated[str, Meta(max_length=MAX_CHARACTERS)]


_TEXT: Final = msgspec.json.Decoder(_Text)
_LIST: Final = msgspec.json.Decoder(list[_Text | TokenId | list[TokenId]])


class CompletionRequest(AnswerFields, frozen=True, kw_only=True):
    """The body of POST /v1/completions: *prompt* is a text, a list of texts, token ids, or a list of token id lists.

    With *echo*, each answer begins with its prompt. *logprobs* is the number of log probabilities per position.
    *priority* means the same as in chats.
    """

    model: str | None = None
    prompt: Annotated[Raw, Meta(extra_json_schema=_PromptSchema)]
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    best_of: Count | None = None
    priority: Priority | None = None


def parse_completion(body: Body, strict: bool = False) -> tuple[CompletionBatch, str]:
    """Return the batch in *body*, and a warning about ignored parameters. Raises the same errors as parse_chat()."""
    completion, warning = _READER.read_parameters(body, strict)
    check_stream(completion)
    num_samples = completion.n or 1
    if completion.best_of not in (None, num_samples):
        raise UnsupportedParameter(
            f"`best_of` is {completion.best_of} and `n` is {num_samples}: answers are not ranked; leave `best_of` out.",
            "best_of",
        )
    prompts = _read_prompts(completion.prompt)
    if len(prompts) * num_samples > MAX_NUM_SAMPLES:
        raise InvalidValue(
            f"`prompt` has {len(prompts)} prompts with {num_samples} answers each; a request has {MAX_NUM_SAMPLES} "
            "answers at most.",
            "prompt",
        )
    with_logprobs = completion.logprobs is not None
    shared: dict[str, Any] = {name: getattr(completion, name) for name in _SHARED}
    if completion.max_tokens is None and completion.max_completion_tokens is None:
        shared["max_tokens"] = DEFAULT_MAX_TOKENS
    if completion.echo and with_logprobs:
        shared["prompt_logprobs"] = max(completion.logprobs or 0, completion.prompt_logprobs or 0)
    # The token ids determine the offsets of log probabilities in the text.
    shared["return_token_ids"] = completion.return_token_ids or with_logprobs
    request = ChatRequest(messages=[], logprobs=with_logprobs, top_logprobs=completion.logprobs, **shared)
    batch = CompletionBatch(
        prompts,
        request,
        bool(completion.echo),
        bool(completion.return_token_ids),
        completion.prompt_logprobs is not None,
    )
    return batch, warning


def _read_prompts(raw: Raw) -> list[PlainPrompt]:
    """Return the prompts, each with the field that it came from. Raises InvalidValue."""
    text = bytes(raw)
    if text.startswith(b'"'):
        return [PlainPrompt(decode(raw, _TEXT, "prompt"), "prompt")]
    if num_items(text) > MAX_TOKENS and not text.startswith(b'["'):
        raise InvalidValue(f"`prompt` must have at most {MAX_TOKENS} tokens.", "prompt")
    match decode(raw, _LIST, "prompt"):
        case []:
            raise InvalidValue("`prompt` is empty; send a text or token ids.", "prompt")
        case [int(), *_] as one if all(isinstance(item, int) for item in one):
            return [PlainPrompt([item for item in one if isinstance(item, int)], "prompt")]
        case [first, *_] as several if all(type(item) is type(first) for item in several):
            return [
                PlainPrompt(item, f"prompt[{index}]")
                for index, item in enumerate(several)
                if isinstance(item, str | list)
            ]
    raise InvalidValue("`prompt` must be a text, texts, token ids, or lists of token ids, and not a mix.", "prompt")


_SHARED: Final = tuple(
    name
    for name in CompletionRequest.__struct_fields__
    if name in ChatRequest.__struct_fields__ and name not in ("logprobs", "return_token_ids")
)
_READER: Final = ParameterReader(CompletionRequest, later=NOT_SERVED)


def read_completion(strict: bool, body: Body, tenant: bytes) -> ReadBody:
    """Read the body of POST /v1/completions. Once `partial` has bound *strict*, this function is a ReadApi."""
    batch, warning = parse_completion(body, strict)
    joined = JoinedAnswers(batch)
    kind = CompletionEvents if batch.request.stream else CompletionObject
    formats = [
        Format(_names(batch, prompt), partial(kind, joined, index, prompt), error_event, prompt)
        for index, prompt in enumerate(batch.prompts)
    ]
    return ReadBody(batch.request, warning, formats)


def _names(batch: CompletionBatch, prompt: PlainPrompt) -> FieldNames:
    names = {"messages": prompt.field, "top_logprobs": "logprobs", "max_completion_tokens": "max_tokens"}
    # Without this parameter, `echo` and `logprobs` together request them.
    return FieldNames(names if batch.prompt_logprobs else {**names, "prompt_logprobs": "logprobs"})

"""The wire format of POST /v1/completions: whole answers, and the pieces of streamed ones."""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from saccade.gateway.output.answer import Usage
from saccade.gateway.output.logprobs import PromptLogprob


class CompletionLogprobs(Struct, frozen=True):
    """The tokens of a text, with their log probabilities: tokens[i] begins at character text_offset[i].

    The first token of a prompt has no log probability.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct, frozen=True):
    """One answer to one prompt, or a piece of it; only the last piece has a *finish_reason*."""

    text: str
    index: int
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET


class Completion(Struct, frozen=True, kw_only=True):
    """The answers to all prompts, or one event of the stream. The answers to prompt i begin at index i * n."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"

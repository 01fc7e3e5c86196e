"""Log probabilities of an answer and its prompt, in OpenAI's and vLLM's formats."""

from collections.abc import Iterable, Sequence

from msgspec import Struct

from saccade.protocol.output import TokenLogprob
from saccade.tokenization.tokenizer import Tokenizer

LOWEST = -9999.0
"""Sent for minus infinity, which JSON lacks; vLLM's value (entrypoints/openai/chat_completion/serving.py)."""


class TopLogprob(Struct, frozen=True):
    """A possible token at a position, and its log probability there.

    *bytes* are the token's bytes; *token* is their text, with U+FFFD for each incomplete character.
    """

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobs(TopLogprob, frozen=True):
    """One of the answer's tokens, and the likeliest tokens at its position."""

    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(Struct, frozen=True):
    """An entry for each token, including reasoning tokens and the token that ended the answer."""

    content: list[TokenLogprobs]
    refusal: None = None


class PromptLogprob(Struct, frozen=True):
    """A token's log probability at a position in the prompt; *rank* is 1 for the likeliest token."""

    logprob: float
    rank: int
    decoded_token: str


def choice_logprobs(tokenizer: Tokenizer, token_ids: Iterable[int], logprobs: Iterable[TokenLogprob]) -> ChoiceLogprobs:
    """Return OpenAI's object for a choice's tokens; logprobs[i] belongs to token_ids[i]."""
    return ChoiceLogprobs([_entry(tokenizer, *pair) for pair in zip(token_ids, logprobs, strict=False)])


def prompt_logprobs(
    tokenizer: Tokenizer, prompt: Sequence[int], logprobs: Sequence[TokenLogprob]
) -> list[dict[str, PromptLogprob] | None]:
    """Return vLLM's list for the token ids *prompt*.

    logprobs[i] belongs to prompt[i + 1], since the first token has none.
    """
    return [None, *(_ranked(tokenizer, *pair) for pair in zip(prompt[1:], logprobs, strict=False))]


def _entry(tokenizer: Tokenizer, token_id: int, logprob: TokenLogprob) -> TokenLogprobs:
    spelled = tokenizer.bytes_of[token_id]
    return TokenLogprobs(
        token=_text(spelled),
        logprob=max(logprob.logprob, LOWEST),
        bytes=list(spelled),
        top_logprobs=[_top(tokenizer, *top) for top in zip(logprob.top_ids, logprob.top_logprobs, strict=False)],
    )


def _top(tokenizer: Tokenizer, token_id: int, logprob: float) -> TopLogprob:
    spelled = tokenizer.bytes_of[token_id]
    return TopLogprob(_text(spelled), max(logprob, LOWEST), list(spelled))


def _ranked(tokenizer: Tokenizer, token_id: int, logprob: TokenLogprob) -> dict[str, PromptLogprob]:
    ranked = {token_id: (logprob.logprob, logprob.rank)}
    for rank, (top_id, top_logprob) in enumerate(zip(logprob.top_ids, logprob.top_logprobs, strict=False), start=1):
        ranked.setdefault(top_id, (top_logprob, rank))
    return {
        str(known_as): PromptLogprob(max(value, LOWEST), rank, _text(tokenizer.bytes_of[known_as]))
        for known_as, (value, rank) in ranked.items()
    }


def _text(spelled: bytes) -> str:
    return spelled.decode(errors="replace")

"""Holds the ids and log probabilities of a choice's tokens until they are written."""

from msgspec import UNSET, UnsetType

from saccade.gateway.output.logprobs import ChoiceLogprobs, choice_logprobs
from saccade.protocol.output import TokenDelta, TokenLogprob
from saccade.tokenization.tokenizer import Tokenizer


class TokenRecord:
    """Holds a choice's tokens that are not written yet, for a client that requests their ids or log probabilities."""

    def __init__(self, tokenizer: Tokenizer, with_ids: bool, with_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._with_ids = with_ids
        self._with_logprobs = with_logprobs
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._num_recalled = 0

    def add_tokens(self, delta: TokenDelta, num_tokens: int) -> None:
        """Add the first *num_tokens* of *delta*: the tokens after a stop string do not belong to the answer.

        If *num_tokens* is negative, drop that many: the stop string was in tokens that looked like the beginning of a
        call.
        """
        if num_tokens < 0:
            self._num_recalled += max(0, -num_tokens - len(self._token_ids))
            del self._token_ids[num_tokens:], self._logprobs[num_tokens:]
        else:
            self._token_ids += delta.token_ids[:num_tokens]
            self._logprobs += delta.logprobs[:num_tokens]

    def recall(self) -> int:
        """Return how many tokens that flush() has already returned do not belong to the answer after all."""
        num_recalled, self._num_recalled = self._num_recalled, 0
        return num_recalled

    def flush(self) -> tuple[ChoiceLogprobs | None, list[int] | UnsetType]:
        """Return the requested log probabilities and ids of the tokens since the last call."""
        token_ids, logprobs = self._token_ids, self._logprobs
        self._token_ids, self._logprobs = [], []
        return (
            choice_logprobs(self._tokenizer, token_ids, logprobs) if self._with_logprobs else None,
            token_ids if self._with_ids else UNSET,
        )

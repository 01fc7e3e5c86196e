"""Translates vLLM's streamed answers to TokenDeltas, and its refusals to errors for clients."""

from http import HTTPStatus

import msgspec

from saccade.connectors.answer_bounds import FINISH_REASONS, NOT_ASKED_FOR, TOO_LONG, AnswerBounds
from saccade.connectors.session import LOST, NOT_READY
from saccade.errors import (
    DeadlineExceeded,
    QueueFull,
    RequestError,
    SaccadeError,
    WorkerFailed,
    WorkerUnavailable,
)
from saccade.protocol.output import TokenDelta, TokenLogprob
from saccade.protocol.request import EngineRequest
from saccade.transport.framing import UNREADABLE

TOKEN_ID = "token_id:"  # noqa: S105
"""How a chat's log probabilities name a token, with `return_tokens_as_token_ids`."""

REFUSED = "The worker does not accept this request as it is."
GIVEN_UP = "The worker gave this request up."

MAX_BRACKETS, MAX_VALUES = 65_536, 1 << 21
"""Of an event: arrays and objects, and commas. A token with 20 log probabilities has 45 of the first, and the longest
event repeats the ids of a prompt. Those in texts count, too, and are few."""


class _Top(msgspec.Struct):
    """A token and its log probability. The token is *token_id* with a *rank*, or in chats *token* without one."""

    logprob: float
    token_id: int | None = None
    token: str = ""
    rank: int | None = None

    @property
    def id(self) -> int:
        return self.token_id if self.token_id is not None else int(self.token.removeprefix(TOKEN_ID))


class _Token(_Top):
    """A drawn token, and the most likely ones in its place."""

    top_logprobs: list[_Top] = []


class _Logprobs(msgspec.Struct):
    """One entry for each token of a choice."""

    content: list[_Token] | None = None


class _SampleEvent(msgspec.Struct):
    """What an event adds to one sample."""

    index: int
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _PromptDetails(msgspec.Struct):
    """Details about the prompt; null unless the server runs with --enable-prompt-tokens-details."""

    cached_tokens: int | None = None


class _UsageEvent(msgspec.Struct):
    """The usage, which is in the last event."""

    prompt_tokens_details: _PromptDetails | None = None


class _Error(msgspec.Struct):
    """A failure after the answer has begun; *code* is an HTTP status."""

    code: int | str | None = None


class _Event(msgspec.Struct):
    """One event of either stream; other fields are ignored."""

    choices: list[_SampleEvent] = []
    usage: _UsageEvent | None = None
    error: _Error | None = None
    prompt_token_ids: list[int] | None = None


class VllmAnswer:
    """The answer to *request* as it arrives: take() every event, then close() at the stream's end.

    vLLM counts cached tokens in its last event, so the last delta of sample 0 waits for that. *begun* is true once a
    token has come. *prompt_token_ids* are those of the worker's own prompt, if it reports them.
    """

    def __init__(self, request: EngineRequest) -> None:
        self.begun = False
        self.prompt_token_ids: list[int] | None = None
        self._request_id = request.request_id
        self._num_logprobs = request.sampling.num_logprobs
        self._open = set(range(request.num_samples))
        self._num_samples = request.num_samples
        self._last: TokenDelta | None = None
        self._num_cached_tokens = 0
        self._bounds = AnswerBounds(request)
        self._num_events_left = self._bounds.num_left
        self._events = msgspec.json.Decoder(_Event)

    def take(self, data: bytes) -> list[TokenDelta]:
        """Return what an event adds. Raises its error, or WorkerFailed if it is malformed or more than requested."""
        self._num_events_left -= 1
        num_brackets = data.count(b"[") + data.count(b"{")
        if self._num_events_left < 0 or num_brackets > MAX_BRACKETS or data.count(b",") > MAX_VALUES:
            raise WorkerFailed(TOO_LONG)
        try:
            event = self._events.decode(data)
            deltas = [delta for choice in event.choices if (delta := self._delta(choice)) is not None]
        except (ValueError, *UNREADABLE) as error:
            raise WorkerFailed("The worker sent something that is no part of an answer.") from error
        if event.error is not None:
            raise error_of(event.error.code, begun=self.begun)
        if event.usage is not None and event.usage.prompt_tokens_details is not None:
            self._num_cached_tokens = event.usage.prompt_tokens_details.cached_tokens or 0
        if event.prompt_token_ids is not None:
            self.prompt_token_ids = event.prompt_token_ids
        return deltas

    def close(self) -> TokenDelta:
        """Return the last delta. Raises WorkerFailed if the stream ended before all samples had."""
        if self._open or self._last is None:
            raise WorkerFailed("The worker ended the answer without saying why.")
        return msgspec.structs.replace(self._last, num_cached_tokens=self._num_cached_tokens)

    def _delta(self, choice: _SampleEvent) -> TokenDelta | None:
        if not 0 <= choice.index < self._num_samples:
            raise WorkerFailed(NOT_ASKED_FOR)
        token_ids = choice.token_ids or []
        if choice.index not in self._open or not (token_ids or choice.finish_reason):
            return None
        reason = FINISH_REASONS.get(choice.finish_reason) if choice.finish_reason else None
        if choice.finish_reason and reason is None:
            raise WorkerFailed(GIVEN_UP)
        self.begun = self.begun or bool(token_ids)
        logprobs = self._logprobs(choice, len(token_ids))
        delta = TokenDelta(self._request_id, token_ids, reason, index=choice.index, logprobs=logprobs)
        self._bounds.check(delta)
        if reason is not None:
            self._open.remove(choice.index)
            if choice.index == 0:
                self._last = delta
                return None
        return delta

    def _logprobs(self, choice: _SampleEvent, num_tokens: int) -> list[TokenLogprob]:
        if self._num_logprobs is None:
            return []
        content = (choice.logprobs.content if choice.logprobs is not None else None) or []
        if len(content) != num_tokens:
            raise WorkerFailed("The worker sent tokens without the log probabilities that were asked for.")
        return [_logprob(token, self._num_logprobs) for token in content]


def _logprob(token: _Token, num_top: int) -> TokenLogprob:
    """Return a token's log probability with the *num_top* most likely tokens, which in vLLM may include the token.

    Without a rank, as in chats, a token that is not among them comes after them.
    """
    top = sorted(token.top_logprobs, key=lambda one: -one.logprob)[:num_top]
    top_ids = [one.id for one in top]
    rank = token.rank or (top_ids.index(token.id) + 1 if token.id in top_ids else len(top_ids) + 1)
    return TokenLogprob(token.logprob, rank, top_ids, [one.logprob for one in top])


def error_of(code: int | str | None, *, begun: bool) -> SaccadeError:
    """Return what an HTTP status means for the client; *begun* says whether part of the answer had arrived.

    vLLM's own words are not shown.
    """
    match code:
        case HTTPStatus.TOO_MANY_REQUESTS:
            return QueueFull("The worker has too much work; try again shortly.")
        case HTTPStatus.UNAUTHORIZED | HTTPStatus.FORBIDDEN | HTTPStatus.NOT_FOUND | HTTPStatus.SERVICE_UNAVAILABLE:
            return WorkerFailed(LOST) if begun else WorkerUnavailable(NOT_READY)
        case HTTPStatus.GATEWAY_TIMEOUT | HTTPStatus.REQUEST_TIMEOUT:
            return DeadlineExceeded("The worker took longer than its limit.")
        case int() if HTTPStatus.BAD_REQUEST <= code < HTTPStatus.INTERNAL_SERVER_ERROR:
            return RequestError(REFUSED)
    return WorkerFailed(LOST if begun else GIVEN_UP)

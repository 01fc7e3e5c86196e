"""Translates GenerateResponses of SMG's scheduler wires to TokenDeltas, and their gRPC statuses to errors.

The messages of TokenSpeed's and SGLang's wires have the same fields for an answer.
"""

from collections.abc import Sequence
from typing import Any

import grpc

from saccade.connectors.answer_bounds import FINISH_REASONS, NOT_ASKED_FOR, AnswerBounds
from saccade.connectors.session import LOST, NOT_READY
from saccade.errors import (
    DeadlineExceeded,
    QueueFull,
    RequestError,
    SaccadeError,
    UnsupportedParameter,
    WorkerFailed,
    WorkerUnavailable,
)
from saccade.protocol.output import FinishReason, TokenDelta, TokenLogprob
from saccade.protocol.request import EngineRequest

REFUSED = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.FAILED_PRECONDITION,
)


class SmgAnswer:
    """One answer as it arrives. Call take() with every message, and close() if the stream ends without a last one."""

    def __init__(self, request: EngineRequest) -> None:
        self.finished = False
        """Whether the worker has ended its answer."""

        self._request_id = request.request_id
        self._with_logprobs = request.sampling.num_logprobs is not None
        self._stop_token_ids = frozenset(request.sampling.stop_token_ids)
        self._bounds = AnswerBounds(request)
        self._num_tokens = 0
        self._newest: int | None = None
        self._last: TokenDelta | None = None

    @property
    def begun(self) -> bool:
        """Whether a token has come."""
        return self._num_tokens > 0

    def take(self, response: Any) -> TokenDelta | None:
        """Return what *response* adds, or None. Raises WorkerFailed if it makes no sense or is too much."""
        # There is a message for every token, and every field that is read takes time.
        if response.HasField("chunk"):
            chunk = response.chunk
            _check_index(chunk)
            # Some workers that ignore end-of-sequence ids go on after a stop id; the rest is dropped.
            return self._last or self._chunk(chunk)
        if response.HasField("complete"):
            _check_index(response.complete)
            self.finished = True
            return self._last or self._complete(response.complete)
        raise WorkerFailed(NOT_ASKED_FOR)

    def close(self) -> TokenDelta:
        """Return the last delta if it is known already. Raises WorkerFailed if the stream ended without one."""
        if self._last is None:
            raise WorkerFailed("The worker ended the answer without saying why.")
        return self._last

    def _chunk(self, chunk: Any) -> TokenDelta | None:
        token_ids = list(chunk.token_ids)
        if not token_ids:
            return None
        logprobs = self._logprobs(chunk, token_ids) if self._with_logprobs else []
        if self._stop_token_ids.isdisjoint(token_ids):
            return self._delta(token_ids, None, chunk, logprobs)
        end = next(index for index, token_id in enumerate(token_ids, 1) if token_id in self._stop_token_ids)
        # The worker's own last message follows at once; leaving before it would abort the request at the worker.
        self._last = self._delta(token_ids[:end], FinishReason.STOP, chunk, logprobs[:end])
        return None

    def _complete(self, complete: Any) -> TokenDelta:
        reason = FINISH_REASONS.get(complete.finish_reason)
        if reason is None:
            raise WorkerFailed("The worker gave this request up.")
        # output_ids is the whole answer, or else the last chunk again.
        token_ids = list(complete.output_ids[self._num_tokens :])
        logprobs = self._logprobs(complete, token_ids) if self._with_logprobs and token_ids else []
        matched = complete.matched_token_id if complete.WhichOneof("matched_stop") == "matched_token_id" else None
        if matched is not None and matched != (token_ids[-1] if token_ids else self._newest):
            token_ids.append(matched)
        return self._delta(token_ids, reason, complete, logprobs)

    def _logprobs(self, message: Any, token_ids: Sequence[int]) -> list[TokenLogprob]:
        """Return the log probabilities of *token_ids*, the newest tokens of *message*.

        Raises UnsupportedParameter if there are none.

        A worker that was started without log probabilities leaves them out; every worker does so for a stop id that it
        trims.
        """
        logprobs = message.output_logprobs
        first = len(logprobs.token_logprobs) - len(token_ids)
        if first < 0:
            raise UnsupportedParameter(
                "This model's workers give no log probabilities; leave out `logprobs`.", "logprobs"
            )
        tops = logprobs.top_logprobs[first:] or [None] * len(token_ids)
        return [_logprob(*row) for row in zip(token_ids, logprobs.token_logprobs[first:], tops, strict=False)]

    def _delta(
        self, token_ids: list[int], reason: FinishReason | None, message: Any, logprobs: list[TokenLogprob]
    ) -> TokenDelta:
        num_cached_tokens = 0 if self._num_tokens else message.cached_tokens
        self._num_tokens += len(token_ids)
        self._newest = token_ids[-1] if token_ids else self._newest
        delta = TokenDelta(self._request_id, token_ids, reason, num_cached_tokens, logprobs=logprobs)
        self._bounds.check(delta)
        return delta


def _check_index(message: Any) -> None:
    """Raise WorkerFailed unless *message* is for sample 0, the only one of a request on these wires."""
    if message.index:
        raise WorkerFailed(NOT_ASKED_FOR)


def _logprob(token_id: int, logprob: float, top: Any | None) -> TokenLogprob:
    """Return the log probability of a token. The wire has no rank: a token that is not among the top comes last."""
    if top is None:
        return TokenLogprob(logprob, 1, [], [])
    top_ids = list(top.token_ids)
    rank = top_ids.index(token_id) + 1 if token_id in top_ids else len(top_ids) + 1
    return TokenLogprob(logprob, rank, top_ids, list(top.values))


def error_of(status: grpc.StatusCode, *, begun: bool) -> SaccadeError:
    """Return what a gRPC status means for the client; *begun* says whether part of the answer had arrived.

    The servicer makes the statuses from its engine's (smg_grpc_servicer/engine_status.py). Its sentences are the
    engine's and are not shown.
    """
    if status in REFUSED:
        return RequestError("The worker does not accept this request as it is.")
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return QueueFull("The worker has too much work; try again shortly.")
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded("The worker took longer than its limit.")
    if status is grpc.StatusCode.UNAVAILABLE and not begun:
        return WorkerUnavailable(NOT_READY)
    return WorkerFailed(LOST)

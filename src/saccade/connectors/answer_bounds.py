"""Bounds on what a worker may send as the answer to one request, on any wire."""

import math
from collections import Counter

from saccade.errors import WorkerFailed
from saccade.protocol.output import FinishReason, PixelsWanted, TokenDelta
from saccade.protocol.request import EngineRequest

MAX_EMPTY_DELTAS = 1024
"""Deltas without a token, such as the end of a sample."""

MAX_QUESTIONS = 32
"""Requests for the pixels of one image: a preempted request may ask again. Each reply may repeat all its bytes."""

FINISH_REASONS = {"stop": FinishReason.STOP, "tool_calls": FinishReason.STOP, "length": FinishReason.LENGTH}
"""The words of workers of other projects; all others mean that the worker gave up."""

NOT_ASKED_FOR = "The worker sent an answer that was not asked for."
TOO_LONG = "The worker sent more than was asked for."


class AnswerBounds:
    """Limits what arrives for *request*. A worker that does not stop could fill memory and use up a tenant's tokens."""

    def __init__(self, request: EngineRequest) -> None:
        self._sampling = request.sampling
        self._num_tokens = [0] * request.num_samples
        self._num_prompt_logprobs_left = len(request.token_ids)
        self._num_empty = 0
        self._num_images = len(request.media)
        self._questions: Counter[int] = Counter()

    @property
    def num_left(self) -> int:
        """The most deltas that the request may still get."""
        num_tokens = len(self._num_tokens) * self._sampling.max_tokens - sum(self._num_tokens)
        return max(0, num_tokens + MAX_EMPTY_DELTAS - self._num_empty)

    def check(self, message: TokenDelta | PixelsWanted) -> None:
        """Raise WorkerFailed if *message* exceeds what the request asked for."""
        if isinstance(message, PixelsWanted):
            self._check_question(message.media)
            return
        if not message.token_ids:
            self._num_empty += 1
            if self._num_empty > MAX_EMPTY_DELTAS:
                raise WorkerFailed(TOO_LONG)
        if not 0 <= message.index < len(self._num_tokens):
            raise WorkerFailed(NOT_ASKED_FOR)
        self._num_tokens[message.index] += len(message.token_ids)
        if self._num_tokens[message.index] > self._sampling.max_tokens:
            raise WorkerFailed(TOO_LONG)
        if message.logprobs or message.prompt_logprobs:
            self._check_logprobs(message)

    def _check_question(self, media: list[int]) -> None:
        names_each_once = 0 < len(media) <= self._num_images and len(set(media)) == len(media)
        if not names_each_once or not 0 <= min(media) <= max(media) < self._num_images:
            raise WorkerFailed(NOT_ASKED_FOR)
        self._questions.update(media)
        if max(self._questions[index] for index in media) > MAX_QUESTIONS:
            raise WorkerFailed(TOO_LONG)

    def _check_logprobs(self, delta: TokenDelta) -> None:
        self._num_prompt_logprobs_left -= len(delta.prompt_logprobs)
        too_many = len(delta.logprobs) > len(delta.token_ids) or self._num_prompt_logprobs_left < 0
        # Some engines add the drawn token to the most likely ones.
        num_top = max(self._sampling.num_logprobs or 0, self._sampling.num_prompt_logprobs or 0) + 1
        entries = (*delta.logprobs, *delta.prompt_logprobs)
        if too_many or any(max(len(one.top_ids), len(one.top_logprobs)) > num_top for one in entries):
            raise WorkerFailed(TOO_LONG)
        # Minus infinity is valid: the token could not be drawn. NaN fails the comparison.
        if not all(value < math.inf for one in entries for value in (one.logprob, *one.top_logprobs)):
            raise WorkerFailed("The worker sent a log probability that is not a number.")

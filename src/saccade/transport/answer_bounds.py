"""What a worker may send as the answer to one request, whatever its wire."""

from saccade.errors import WorkerFailed
from saccade.protocol.output import PixelsWanted, TokenDelta
from saccade.protocol.request import EngineRequest

MAX_OTHER_MESSAGES = 1024
"""Messages that bring no token: questions for pixels, which a preempted request asks again, and ends of samples."""

NOT_ASKED_FOR = "The worker sent an answer that was not asked for."
TOO_LONG = "The worker sent more than was asked for."


class AnswerBounds:
    """Counts what arrives for *request*. A worker that does not stop would fill memory and use up a tenant's tokens."""

    def __init__(self, request: EngineRequest) -> None:
        self._sampling = request.sampling
        self._num_tokens = [0] * request.num_samples
        self._num_prompt_logprobs_left = len(request.token_ids)
        self._num_others = 0

    def check(self, message: TokenDelta | PixelsWanted) -> None:
        """Raise WorkerFailed where *message* is more than the request asked for."""
        if isinstance(message, PixelsWanted) or not message.token_ids:
            self._num_others += 1
            if self._num_others > MAX_OTHER_MESSAGES:
                raise WorkerFailed(TOO_LONG)
        if isinstance(message, PixelsWanted):
            return
        if not 0 <= message.index < len(self._num_tokens):
            raise WorkerFailed(NOT_ASKED_FOR)
        self._num_tokens[message.index] += len(message.token_ids)
        if self._num_tokens[message.index] > self._sampling.max_tokens:
            raise WorkerFailed(TOO_LONG)
        if message.logprobs or message.prompt_logprobs:
            self._check_logprobs(message)

    def _check_logprobs(self, delta: TokenDelta) -> None:
        self._num_prompt_logprobs_left -= len(delta.prompt_logprobs)
        too_many = len(delta.logprobs) > len(delta.token_ids) or self._num_prompt_logprobs_left < 0
        # Some engines add the drawn token to the likeliest.
        num_top = max(self._sampling.num_logprobs or 0, self._sampling.num_prompt_logprobs or 0) + 1
        if too_many or any(
            max(len(one.top_ids), len(one.top_logprobs)) > num_top for one in (*delta.logprobs, *delta.prompt_logprobs)
        ):
            raise WorkerFailed(TOO_LONG)

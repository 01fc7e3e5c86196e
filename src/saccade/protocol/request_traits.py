"""RequestTraits: the traits of a request that decide which workers can serve it."""

from dataclasses import dataclass
from enum import IntFlag

from saccade.errors import RequestError
from saccade.protocol.request import EngineRequest, SamplingParams


class Need(IntFlag):
    """What a request may need that not every worker offers."""

    SEVERAL_ANSWERS = 1
    ALLOWED_TOKENS = 2
    PROMPT_LOGPROBS = 4
    SEED = 8
    GRAMMAR = 16
    THINKING_BUDGET = 32
    IMAGES = 64
    TOKEN_IDS = 128


@dataclass(frozen=True)
class RequestTraits:
    """The traits of a request that decide whether a worker can serve it."""

    num_tokens: int
    """Of the prompt."""
    sampling: SamplingParams | None = None
    """None for defaults."""
    num_samples: int = 1
    """Answers."""
    has_images: bool = False
    salt: bytes = b""
    """The tenant's."""
    needs_token_ids: RequestError | None = None
    """Why a worker that takes only chats cannot serve it; None if it can."""

    @property
    def needs(self) -> Need:
        """What the request needs. Apart from that, only its length and its salt decide which workers can serve it."""
        needs, sampling = Need(0), self.sampling
        if self.num_samples > 1:
            needs |= Need.SEVERAL_ANSWERS
        if self.has_images:
            needs |= Need.IMAGES
        if self.needs_token_ids is not None:
            needs |= Need.TOKEN_IDS
        if sampling is None:
            return needs
        if sampling.allowed_token_ids:
            needs |= Need.ALLOWED_TOKENS
        if sampling.num_prompt_logprobs is not None:
            needs |= Need.PROMPT_LOGPROBS
        if sampling.seed is not None and sampling.temperature > 0:
            needs |= Need.SEED
        if sampling.grammar is not None:
            needs |= Need.GRAMMAR
        if sampling.thinking_budget is not None:
            needs |= Need.THINKING_BUDGET
        return needs

    @classmethod
    def of_request(cls, request: EngineRequest) -> "RequestTraits":
        """Return the traits of *request*, which is sent as token ids."""
        return cls(len(request.token_ids), request.sampling, request.num_samples, bool(request.media), request.salt)

"""What a request needs of a worker."""

from enum import IntFlag
from typing import NamedTuple

from saccade.protocol.request import EngineRequest, SamplingParams


class Need(IntFlag):
    """What a request may need that not every worker offers."""

    SEVERAL_ANSWERS = 1
    ALLOWED_TOKENS = 2
    PROMPT_LOGPROBS = 4
    SEED = 8
    GRAMMAR = 16
    """The answer should match a grammar."""
    ENFORCED_GRAMMAR = 32
    """It must, so a worker that cannot enforce grammars is of no use."""
    THINKING_BUDGET = 64
    IMAGES = 128
    TOKEN_IDS = 256
    """The prompt has a meaning that a chat lacks."""


NO_NEED = Need(0)


class Lacks(NamedTuple):
    """The needs that some of a model's workers cannot serve, and those that all of them cannot."""

    of_some: Need
    of_all: Need


def needs_of(sampling: SamplingParams, num_samples: int, *, has_images: bool) -> Need:
    """Return the needs of a request for *num_samples* answers that can be told from these values."""
    return Need(
        (num_samples > 1) * Need.SEVERAL_ANSWERS
        | bool(sampling.allowed_token_ids) * Need.ALLOWED_TOKENS
        | (sampling.num_prompt_logprobs is not None) * Need.PROMPT_LOGPROBS
        | (sampling.seed is not None and sampling.temperature > 0) * Need.SEED
        | (sampling.grammar is not None) * Need.GRAMMAR
        | (sampling.thinking_budget is not None) * Need.THINKING_BUDGET
        | has_images * Need.IMAGES
    )


def needs_of_request(request: EngineRequest) -> Need:
    """Return the needs of *request*."""
    return needs_of(request.sampling, request.num_samples, has_images=bool(request.media))

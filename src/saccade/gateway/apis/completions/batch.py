"""A batch: the prompts of one request body, which are answered together."""

from dataclasses import dataclass

from saccade.gateway.chat import PlainPrompt
from saccade.gateway.chat_request import ChatRequest


@dataclass(frozen=True)
class CompletionBatch:
    """A body of POST /v1/completions: *prompts*, their *request*, and what the answers contain besides text."""

    prompts: list[PlainPrompt]
    request: ChatRequest
    echo: bool
    token_ids: bool
    prompt_logprobs: bool

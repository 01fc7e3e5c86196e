"""How answers are sampled, and the other options of a chat from Python."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import msgspec
from msgspec import UNSET

from saccade.errors import InvalidValue
from saccade.gateway.chat import AnswerFields


class SamplingParams(AnswerFields, frozen=True, kw_only=True):
    """How `n` answers are sampled. Names, bounds and defaults are those of the API; None is the default.

        SamplingParams(temperature=0, max_tokens=128, stop=["."])

    A wrong value is the error of every answer. *logprobs* may be a number, as in vLLM: of the most likely tokens to
    return for each position.
    """

    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    thinking_token_budget: int | None = None

    def fields(self) -> dict[str, Any]:
        """Return what is set, as fields of a request. Raises InvalidValue for a number that JSON lacks."""
        values = msgspec.structs.asdict(self).items()
        fields = {name: value for name, value in values if value is not None and value is not UNSET}
        for name, value in fields.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise InvalidValue(f"`{name}` must be a finite number, not {value}.", name)
        return fields | ({"logprobs": True, "top_logprobs": self.logprobs} if type(self.logprobs) is int else {})


class ChatOptions(TypedDict, total=False):
    """Other fields of POST /v1/chat/completions; docs/api.md explains them."""

    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    response_format: Mapping[str, Any]
    chat_template: str
    chat_template_kwargs: Mapping[str, Any]
    mm_processor_kwargs: Mapping[str, Any]
    media_io_kwargs: Mapping[str, Any]
    continue_final_message: bool
    enable_thinking: bool
    reasoning_effort: str

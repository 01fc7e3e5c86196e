"""The sampling parameters and other options of a chat from Python."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import msgspec
from msgspec import UNSET

from saccade.errors import InvalidValue
from saccade.gateway.apis.chat.reader import parse_chat
from saccade.gateway.chat_request import AnswerFields


class SamplingParams(AnswerFields, frozen=True, kw_only=True):
    """How to sample `n` answers. Names, bounds and defaults are the API's; None means the default.

        SamplingParams(temperature=0, max_tokens=128, stop=["."])

    *logprobs* may be a number, as in vLLM: how many of the likeliest tokens to return for each position. Raises the
    API's error, such as InvalidValue, for a value that no model takes.
    """

    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    thinking_token_budget: int | None = None

    def __post_init__(self) -> None:
        """Check the values as the API does."""
        chat = {"messages": [{"role": "user", "content": ""}], **self.fields()}
        try:
            parse_chat(msgspec.json.encode(chat), strict=True)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidValue("Sampling parameters are numbers, texts, booleans, lists, dicts and None.") from error

    def fields(self) -> dict[str, Any]:
        """Return the parameters that are set, as fields of a request.

        Raises InvalidValue for NaN and infinity, which JSON lacks.
        """
        values = msgspec.structs.asdict(self).items()
        fields = {name: value for name, value in values if value is not None and value is not UNSET}
        for name, value in fields.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise InvalidValue(f"`{name}` must be a finite number, not {value}.", name)
        return fields | ({"logprobs": True, "top_logprobs": self.logprobs} if type(self.logprobs) is int else {})


class ChatOptions(TypedDict, total=False):
    """Other fields of POST /v1/chat/completions; docs/api/chat.md explains them."""

    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    response_format: Mapping[str, Any] | type
    chat_template: str
    chat_template_kwargs: Mapping[str, Any]
    mm_processor_kwargs: Mapping[str, Any]
    media_io_kwargs: Mapping[str, Any]
    continue_final_message: bool
    enable_thinking: bool
    reasoning_effort: str


def response_format_of(kind: type) -> dict[str, Any]:
    """Return the `response_format` that makes the answer JSON of the type *kind*.

        response_format_of(Label)  # a model of pydantic, a dataclass, a TypedDict, a struct of msgspec

    Raises InvalidValue for a class without a schema.
    """
    make_schema = getattr(kind, "model_json_schema", None)
    try:
        schema = msgspec.json.schema(kind) if make_schema is None else make_schema()
    except TypeError as error:
        raise InvalidValue(
            f"`response_format` may be a pydantic model, a dataclass or a TypedDict, and {kind.__name__} is none.",
            "response_format",
        ) from error
    # The API's names have letters, digits, underscores and hyphens; a generic class has brackets in its own.
    name = re.sub(r"[^A-Za-z0-9_-]", "_", kind.__name__)[:64]
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}

"""Adds up the usage of a batch's answers."""

from collections.abc import Iterable

import msgspec
from msgspec import Struct

from saccade.gateway.apis.batches.wire import BatchUsage, InputDetails, OutputDetails


class _Usage(Struct, frozen=True):
    """The usage of an answer, under the names of chats and completions, or under those of responses."""

    prompt_tokens: int = 0
    input_tokens: int = 0
    completion_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: InputDetails | None = None
    input_tokens_details: InputDetails | None = None
    completion_tokens_details: OutputDetails | None = None
    output_tokens_details: OutputDetails | None = None


class _Body(Struct, frozen=True):
    """The body of an answer."""

    usage: _Usage = _Usage()


class _Response(Struct, frozen=True):
    """The response to a request."""

    body: _Body


class _Line(Struct, frozen=True):
    """A line of an output file."""

    response: _Response


def sum_usage(lines: Iterable[bytes]) -> BatchUsage:
    """Return the sum of the usage in *lines* of an output file."""
    num_input = num_cached = num_output = num_reasoning = 0
    for line in lines:
        usage = msgspec.json.decode(line, type=_Line).response.body.usage
        num_input += usage.prompt_tokens + usage.input_tokens
        num_output += usage.completion_tokens + usage.output_tokens
        for of_input in (usage.prompt_tokens_details, usage.input_tokens_details):
            num_cached += of_input.cached_tokens if of_input is not None else 0
        for of_output in (usage.completion_tokens_details, usage.output_tokens_details):
            num_reasoning += of_output.reasoning_tokens if of_output is not None else 0
    return BatchUsage(
        num_input, num_output, num_input + num_output, InputDetails(num_cached), OutputDetails(num_reasoning)
    )

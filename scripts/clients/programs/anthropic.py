"""anthropic: Messages with images, streams, tools, structured output, and counts of tokens."""

# /// script
# dependencies = ["anthropic==2.12.0"]
# ///

from typing import Any

import anthropic
from questions import CALLER, IMAGE_DATA, IMAGE_SAYS, KEY, MAX_TOKENS, QUESTION, READER, TOOL, Target, expect_call
from results import expect, tell

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": IMAGE_DATA}}
MESSAGES: list[Any] = [{"role": "user", "content": [IMAGE, {"type": "text", "text": QUESTION}]}]
TURN: dict[str, Any] = {
    "name": TOOL["function"]["name"],
    "description": TOOL["function"]["description"],
    "input_schema": TOOL["function"]["parameters"],
}


def messages(target: Target) -> Any:
    """The Messages of a server."""
    return anthropic.Anthropic(base_url=target.root, api_key=KEY, max_retries=0).messages


def chat() -> None:
    """Ask about the image."""
    answer = messages(READER).create(model=READER.model, messages=MESSAGES, max_tokens=MAX_TOKENS)
    expect([block.text for block in answer.content], [IMAGE_SAYS])
    expect(answer.stop_reason, "end_turn")


def stream() -> None:
    """The same, streamed."""
    with messages(READER).stream(model=READER.model, messages=MESSAGES, max_tokens=MAX_TOKENS) as events:
        expect("".join(events.text_stream), IMAGE_SAYS)
        expect(events.get_final_message().usage.output_tokens > 0, True)


def count() -> None:
    """The tokens of the question are those that an answer counts."""
    counted = messages(READER).count_tokens(model=READER.model, messages=MESSAGES)
    usage = messages(READER).create(model=READER.model, messages=MESSAGES, max_tokens=1).usage
    expect(counted.input_tokens, usage.input_tokens + (usage.cache_read_input_tokens or 0))


def call(streamed: bool) -> None:
    """A call of any tool, its result, and the answer to it."""
    asked: dict[str, Any] = {"model": CALLER.model, "tools": [TURN]}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    if streamed:
        with messages(CALLER).stream(messages=MESSAGES, tool_choice=choice, max_tokens=MAX_TOKENS, **asked) as events:
            first = events.get_final_message()
    else:
        first = messages(CALLER).create(messages=MESSAGES, tool_choice=choice, max_tokens=MAX_TOKENS, **asked)
    expect(first.stop_reason, "tool_use")
    (use,) = [block for block in first.content if block.type == "tool_use"]
    expect_call(use.name, use.input)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "done"}, IMAGE]}
    turns = [*MESSAGES, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = messages(CALLER).create(messages=turns, max_tokens=4, **asked)
    expect(second.stop_reason, "max_tokens", "end_turn", "tool_use")


def error() -> None:
    """A wrong value is the client's error of a bad request."""
    try:
        messages(READER).create(model=READER.model, messages=MESSAGES, max_tokens=1, extra_body={"temperature": 9})
    except anthropic.BadRequestError as refused:
        expect("temperature" in refused.message, True)
        return
    raise ValueError("temperature 9 was accepted")


tell(
    "anthropic",
    "anthropic",
    {
        "a message with an image": chat,
        "the same in a stream": stream,
        "`count_tokens`": count,
        "a call of any tool, and its result with an image": lambda: call(False),
        "a call of any tool in a stream": lambda: call(True),
        "an error": error,
    },
)

"""openai-python: chats and Responses, streams, tools, structured output."""

# /// script
# dependencies = ["openai==3.54.0"]
# ///

import json
from typing import Any

import openai
from cards import Card
from questions import (
    ABOUT_VIDEO,
    CALLER,
    IMAGE,
    IMAGE_SAYS,
    IMAGE_URL,
    KEY,
    MAX_TOKENS,
    MESSAGES,
    QUESTION,
    READER,
    TOOL,
    Target,
    expect_call,
)
from results import expect, tell

INPUT: list[Any] = [
    {
        "role": "user",
        "content": [
            {"type": "input_image", "image_url": IMAGE_URL, "detail": "auto"},
            {"type": "input_text", "text": QUESTION},
        ],
    }
]
"""The question about the image, as Responses take it."""


def client(target: Target) -> Any:
    """The client of a server."""
    return openai.OpenAI(base_url=target.url, api_key=KEY, max_retries=0)


def models() -> None:
    """List the models."""
    expect([model.id for model in client(READER).models.list()], [READER.model])


def chat() -> None:
    """Ask about the image."""
    answer = client(READER).chat.completions.create(model=READER.model, messages=MESSAGES)
    expect(answer.choices[0].message.content, IMAGE_SAYS)
    expect(answer.choices[0].finish_reason, "stop")


def stream() -> None:
    """The same, streamed, with usage."""
    chunks = list(
        client(READER).chat.completions.create(
            model=READER.model, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
    )
    expect("".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices), IMAGE_SAYS)
    expect(chunks[-1].usage.completion_tokens > 0, True)


def stream_with_events() -> None:
    """The same with the client's own events."""
    with client(READER).chat.completions.stream(model=READER.model, messages=MESSAGES) as events:
        expect(events.get_final_completion().choices[0].message.content, IMAGE_SAYS)


def video() -> None:
    """Ask about the video."""
    answer = client(READER).chat.completions.create(model=READER.model, messages=ABOUT_VIDEO)
    expect(answer.choices[0].message.content, IMAGE_SAYS)


def error() -> None:
    """A wrong value is an error with its field."""
    try:
        client(READER).chat.completions.create(model=READER.model, messages=MESSAGES, temperature=9)
    except openai.BadRequestError as refused:
        expect(refused.param, "temperature")
        return
    raise ValueError("temperature 9 was accepted")


def tool() -> None:
    """A required call, its result, and the answer to it."""
    asked: dict[str, Any] = {"model": CALLER.model, "tools": [TOOL], "max_tokens": MAX_TOKENS}
    first = client(CALLER).chat.completions.create(
        messages=MESSAGES, tool_choice="required", parallel_tool_calls=False, **asked
    )
    expect(first.choices[0].finish_reason, "tool_calls")
    (call,) = first.choices[0].message.tool_calls
    expect_call(call.function.name, json.loads(call.function.arguments))
    result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    turns = [*MESSAGES, first.choices[0].message, result]
    second = client(CALLER).chat.completions.create(messages=turns, **asked | {"max_tokens": 4})
    expect(second.choices[0].finish_reason, "length", "stop", "tool_calls")


def tool_stream() -> None:
    """A named call, streamed."""
    with client(CALLER).chat.completions.stream(
        model=CALLER.model,
        messages=MESSAGES,
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "turn"}},
        max_tokens=MAX_TOKENS,
    ) as events:
        (call,) = events.get_final_completion().choices[0].message.tool_calls
    expect_call(call.function.name, json.loads(call.function.arguments))


def parse() -> None:
    """A structured answer by a Pydantic model."""
    answer = client(CALLER).chat.completions.parse(
        model=CALLER.model, messages=MESSAGES, response_format=Card, max_tokens=MAX_TOKENS
    )
    expect(type(answer.choices[0].message.parsed), Card)


def parse_tool() -> None:
    """A call whose arguments are a Pydantic model."""
    answer = client(CALLER).chat.completions.parse(
        model=CALLER.model,
        messages=MESSAGES,
        tools=[openai.pydantic_function_tool(Card)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=MAX_TOKENS,
    )
    expect(type(answer.choices[0].message.tool_calls[0].function.parsed_arguments), Card)


def completion() -> None:
    """Go on with a text, which comes first, with the log probabilities of both."""
    prompt = "What does it say?"
    answer = client(READER).completions.create(model=READER.model, prompt=prompt, max_tokens=4, echo=True, logprobs=1)
    (choice,) = answer.choices
    expect(choice.text.startswith(prompt), True)
    expect(len(choice.logprobs.tokens), answer.usage.total_tokens)
    chunks = client(READER).completions.create(model=READER.model, prompt=prompt, max_tokens=4, stream=True)
    expect(prompt + "".join(chunk.choices[0].text for chunk in chunks), choice.text)


def files() -> None:
    """Upload the image once, ask about it by its id, forget it."""
    files = client(READER).files
    file = files.create(file=IMAGE, purpose="vision")
    expect([one.id for one in files.list()], [file.id])
    expect(files.content(file.id).read() == IMAGE.read_bytes(), True)
    content = [{"type": "file", "file": {"file_id": file.id}}, {"type": "text", "text": QUESTION}]
    messages: list[Any] = [{"role": "user", "content": content}]
    answer = client(READER).chat.completions.create(model=READER.model, messages=messages)
    expect(answer.choices[0].message.content, IMAGE_SAYS)
    expect(files.delete(file.id).deleted, True)


def response() -> None:
    """Ask about the image, and continue that by its id."""
    first = client(READER).responses.create(model=READER.model, input=INPUT)
    expect(first.output_text, IMAGE_SAYS)
    second = client(READER).responses.create(model=READER.model, input="Again.", previous_response_id=first.id)
    expect(second.status, "completed")
    expect(second.usage.input_tokens > first.usage.input_tokens, True)


def response_stream() -> None:
    """The same, in events."""
    with client(READER).responses.stream(model=READER.model, input=INPUT) as events:
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        expect(text, IMAGE_SAYS, events.get_final_response().output_text)


def response_tool() -> None:
    """A required call, its result, and the answer to it."""
    asked: dict[str, Any] = {"model": CALLER.model, "tools": [{"type": "function", **TOOL["function"]}]}
    held = {"tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": MAX_TOKENS}
    first = client(CALLER).responses.create(input=INPUT, store=False, **held, **asked)
    (call,) = [item for item in first.output if item.type == "function_call"]
    expect_call(call.name, json.loads(call.arguments))
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    turns = [*INPUT, *first.output, result]
    second = client(CALLER).responses.create(input=turns, store=False, max_output_tokens=4, **asked)
    expect(second.status, "completed", "incomplete")


def response_parse() -> None:
    """A structured answer by a Pydantic model."""
    parsed = client(CALLER).responses.parse(
        model=CALLER.model, input=INPUT, text_format=Card, max_output_tokens=MAX_TOKENS
    )
    expect(type(parsed.output_parsed), Card)


tell(
    "openai-python",
    "openai",
    {
        "models": models,
        "a chat with an image": chat,
        "the same in a stream, with usage": stream,
        "the same with `.stream()`": stream_with_events,
        "a chat with a video": video,
        "the field of an error": error,
        "a required tool call, and its result": tool,
        "a named tool call in a stream": tool_stream,
        "structured output by `.parse`": parse,
        "a tool call by `.parse`": parse_tool,
        "completions, whole and in a stream": completion,
        "an image uploaded by `files`": files,
        "Responses: an image, continued by its id": response,
        "Responses: the same in events": response_stream,
        "Responses: a required tool call, and its result": response_tool,
        "Responses: structured output by `.parse`": response_parse,
    },
)

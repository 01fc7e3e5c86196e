"""LiteLLM: chats, images, tools and structured output, through both of its providers for such servers.

This release imports `mcp` for every request with tools, and does not install it.
"""

# /// script
# dependencies = ["litellm==1.106.2", "mcp==2.3.0"]
# ///

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else its import asks another server for prices

import asyncio
import json
from typing import Any

import litellm
from cards import Card
from questions import (
    ABOUT_VIDEO,
    CALLER,
    IMAGE_DATA,
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


def ask(target: Target, provider: str = "hosted_vllm", **options: Any) -> Any:
    """Ask about the image."""
    return litellm.completion(
        model=f"{provider}/{target.model}",
        api_base=target.url,
        api_key=KEY,
        num_retries=0,
        **{"messages": MESSAGES} | options,
    )


def chat(provider: str) -> None:
    """A whole answer."""
    answer = ask(READER, provider)
    expect(answer.choices[0].message.content, IMAGE_SAYS)
    expect(answer.usage.completion_tokens > 0, True)


def video() -> None:
    """A video."""
    expect(ask(READER, messages=ABOUT_VIDEO).choices[0].message.content, IMAGE_SAYS)


def stream() -> None:
    """The same, streamed."""
    chunks = ask(READER, stream=True)
    expect("".join(chunk.choices[0].delta.content or "" for chunk in chunks), IMAGE_SAYS)


def tool(provider: str) -> None:
    """A required call, its result, and the answer to it."""
    first = ask(
        CALLER, provider, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=MAX_TOKENS
    )
    expect(first.choices[0].finish_reason, "tool_calls")
    (call,) = first.choices[0].message.tool_calls
    expect_call(call.function.name, json.loads(call.function.arguments))
    result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    turns = [*MESSAGES, first.choices[0].message.model_dump(), result]
    second = ask(CALLER, provider, messages=turns, tools=[TOOL], max_tokens=4)
    expect(second.choices[0].finish_reason, "length", "stop", "tool_calls")


def tool_stream() -> None:
    """A required call, streamed, and put together by LiteLLM."""
    options: Any = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": MAX_TOKENS}
    whole: Any = litellm.stream_chunk_builder(list(ask(CALLER, stream=True, **options)))
    (call,) = whole.choices[0].message.tool_calls
    expect_call(call.function.name, json.loads(call.function.arguments))


def structured() -> None:
    """A structured answer by a Pydantic model."""
    answer = ask(CALLER, response_format=Card, max_tokens=MAX_TOKENS)
    Card.model_validate_json(answer.choices[0].message.content)


def completion() -> None:
    """Go on with a text."""
    options: Any = {"api_base": READER.url, "api_key": KEY, "num_retries": 0, "max_tokens": 4}
    answer = litellm.text_completion(model=f"text-completion-openai/{READER.model}", prompt=QUESTION, **options)
    expect(type(answer.choices[0].text), str)
    expect(answer.usage.completion_tokens > 0, True)


def response() -> None:
    """Ask about the image over Responses, whole and in events."""
    content = [{"type": "input_image", "image_url": IMAGE_URL}, {"type": "input_text", "text": QUESTION}]
    asked: Any = {"model": f"openai/{READER.model}", "input": [{"role": "user", "content": content}]}
    server: Any = {"api_base": READER.url, "api_key": KEY, "num_retries": 0}
    expect(litellm.responses(**asked, **server).output_text, IMAGE_SAYS)
    events: Any = litellm.responses(**asked, **server, stream=True)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    expect(text, IMAGE_SAYS)


def message() -> None:
    """Ask about the image over Messages."""
    source = {"type": "base64", "media_type": "image/png", "data": IMAGE_DATA}
    content = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    answer: Any = asyncio.run(
        litellm.anthropic.messages.acreate(
            model=f"anthropic/{READER.model}",
            messages=[{"role": "user", "content": content}],
            max_tokens=MAX_TOKENS,
            api_base=READER.root,
            api_key=KEY,
        )
    )
    expect([block["text"] for block in answer["content"]], [IMAGE_SAYS])


def error() -> None:
    """A wrong value is LiteLLM's error of a bad request."""
    try:
        ask(READER, temperature=9)
    except litellm.BadRequestError as refused:
        expect("temperature" in str(refused), True)
        return
    raise ValueError("temperature 9 was accepted")


tell(
    "LiteLLM",
    "litellm",
    {
        "a chat with an image, `hosted_vllm/`": lambda: chat("hosted_vllm"),
        "a chat with an image, `openai/`": lambda: chat("openai"),
        "a chat with a video": video,
        "a stream": stream,
        "a required tool call, and its result, `hosted_vllm/`": lambda: tool("hosted_vllm"),
        "a required tool call, and its result, `openai/`": lambda: tool("openai"),
        "a required tool call in a stream": tool_stream,
        "structured output by a Pydantic model": structured,
        "completions": completion,
        "Responses: an image, whole and in events": response,
        "Messages: an image": message,
        "an error": error,
    },
)

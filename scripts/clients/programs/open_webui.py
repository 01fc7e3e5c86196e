"""The requests of Open WebUI's server, sent by the HTTP client that it uses: its own package is too large for a trial."""

# /// script
# dependencies = ["aiohttp==3.14.5"]
# ///

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp
from questions import CALLER, IMAGE_SAYS, IMAGE_URL, KEY, MAX_TOKENS, QUESTION, READER, TOOL, Target, expect_call
from results import expect, tell

HEADERS = {
    "Authorization": f"Bearer {KEY}",
    "X-OpenWebUI-User-Name": "A%20person",
    "X-OpenWebUI-User-Id": "1",
    "X-OpenWebUI-User-Email": "person@example.com",
    "X-OpenWebUI-User-Role": "user",
    "X-OpenWebUI-Chat-Id": "2",
}
# The text comes before the image, and the image has no `detail`.
MESSAGES: list[Any] = [
    {"role": "system", "content": "You are a careful reader."},
    {
        "role": "user",
        "content": [{"type": "text", "text": QUESTION}, {"type": "image_url", "image_url": {"url": IMAGE_URL}}],
    },
]
PARAMETERS = {"temperature": 0, "seed": 1, "stop": ["\n\n\n"], "frequency_penalty": 0, "user": "1"}


async def post(target: Target, body: dict[str, Any]) -> Any:
    """Send a chat; the whole answer."""
    async with (
        aiohttp.ClientSession(raise_for_status=True) as session,
        session.post(f"{target.url}/chat/completions", json={"model": target.model, **body}, headers=HEADERS) as answer,
    ):
        return await answer.json()


async def post_stream(target: Target, body: dict[str, Any]) -> list[Any]:
    """Send a chat; the chunks, of a stream that ends as it must."""
    streamed = {"model": target.model, "stream": True, "stream_options": {"include_usage": True}, **body}
    async with (
        aiohttp.ClientSession(raise_for_status=True) as session,
        session.post(f"{target.url}/chat/completions", json=streamed, headers=HEADERS) as answer,
    ):
        expect(answer.content_type, "text/event-stream")
        lines = [line.decode().strip() async for line in answer.content]
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    expect(data[-1], "[DONE]")
    return [json.loads(one) for one in data[:-1]]


async def models() -> None:
    """The list of models, of which Open WebUI reads the ids."""
    async with (
        aiohttp.ClientSession(raise_for_status=True) as session,
        session.get(f"{READER.url}/models", headers=HEADERS) as answer,
    ):
        listed = await answer.json()
    expect([model["id"] for model in listed["data"]], [READER.model])


async def chat() -> None:
    """A chat with an image, streamed, with the usage that is shown below an answer."""
    chunks = await post_stream(READER, {"messages": MESSAGES, **PARAMETERS})
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    expect(text, IMAGE_SAYS)
    expect(any((chunk.get("usage") or {}).get("completion_tokens") for chunk in chunks), True)


async def task() -> None:
    """A title, as for the list of chats: one whole answer."""
    prompt = 'Give this chat a title, as JSON: {"title": "..."}'
    messages = [{"role": "user", "content": prompt}]
    answer = await post(READER, {"messages": messages, "stream": False, "max_completion_tokens": 1000})
    expect(type(answer["choices"][0]["message"]["content"]), str)


async def tool() -> None:
    """A call as a model with native tools makes it, streamed, then a second turn with its result.

    Open WebUI leaves the choice to the model; a grammar holds the call here.
    """
    asked: dict[str, Any] = {"tools": [TOOL], "parallel_tool_calls": False, "max_tokens": MAX_TOKENS}
    chunks = await post_stream(CALLER, {"messages": MESSAGES, "tool_choice": "required", **asked})
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    call, *pieces = [call for delta in deltas for call in delta.get("tool_calls") or []]
    call["function"]["arguments"] += "".join(piece["function"]["arguments"] for piece in pieces)
    expect({piece["index"] for piece in (call, *pieces)}, {0})
    expect_call(call["function"]["name"], json.loads(call["function"]["arguments"]))
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "done"},
    ]
    chunks = await post_stream(CALLER, {"messages": turns, **asked, "max_tokens": 4})
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    expect(len(reasons), 1)


async def response() -> None:
    """A chat over Responses, in events; the image has no `detail` here either."""
    content = [{"type": "input_text", "text": QUESTION}, {"type": "input_image", "image_url": IMAGE_URL}]
    body = {
        "model": READER.model,
        "input": [{"type": "message", "role": "user", "content": content}],
        "instructions": "You are a careful reader.",
        "stream": True,
        "store": False,
    }
    async with (
        aiohttp.ClientSession(raise_for_status=True) as session,
        session.post(f"{READER.url}/responses", json=body, headers=HEADERS) as answer,
    ):
        lines = [line.decode().strip() async for line in answer.content]
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    expect("".join(one["delta"] for one in events if one["type"] == "response.output_text.delta"), IMAGE_SAYS)
    expect(events[-1]["type"], "response.completed")


def run(attempt: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """The attempt in a loop of its own."""
    return lambda: asyncio.run(attempt())


tell(
    "Open WebUI's requests, by aiohttp",
    "aiohttp",
    {
        "models": run(models),
        "a chat with an image in a stream": run(chat),
        "a title": run(task),
        "a tool call in a stream, and its result": run(tool),
        "Responses: a chat with an image in events": run(response),
    },
)

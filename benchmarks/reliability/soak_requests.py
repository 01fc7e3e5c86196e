"""What a soak asks: chats with images, videos, tools and schemas, and the same over the other APIs."""

import base64
import random
from dataclasses import dataclass
from typing import Any, Protocol

import anthropic
import openai
from chats import data_url, openai_messages, random_image
from clips import clip
from PIL import Image

REQUESTS = 300
IMAGES = 60
VIDEOS = 8
QUESTIONS = ("What does it say?", "What colour is it?", "What shape is it?", "Compare them, and go on.")
ARGUMENTS = {
    "type": "object",
    "properties": {"shape": {"enum": ["circle", "square", "star"]}, "count": {"type": "integer"}},
    "required": ["shape", "count"],
    "additionalProperties": False,
}
HELD = {
    "tools": {
        "tools": [{"type": "function", "function": {"name": "file_picture", "parameters": ARGUMENTS}}],
        "tool_choice": "required",
    },
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "filed", "schema": ARGUMENTS}}},
}
"""What grammars hold, by its name: the fields of a chat."""


@dataclass(frozen=True)
class Clients:
    """The official clients of one server."""

    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic


class Request(Protocol):
    """One request of the catalogue. Asked again, it gives the same answers."""

    body: dict[str, Any]
    kind: str
    """In words, for the count of what was asked."""

    async def answers(self, clients: Clients, stop_after: int | None = None) -> list[str]:
        """Return the texts of the samples, as far as they came until the client left after *stop_after* chunks."""
        ...


@dataclass(frozen=True)
class Chat:
    """A chat; what its answer says is text and the calls of tools."""

    body: dict[str, Any]
    kind: str

    async def answers(self, clients: Clients, stop_after: int | None = None) -> list[str]:
        """See Request."""
        reply = await clients.openai.chat.completions.create(**self.body)
        if not self.body["stream"]:
            return [_said(choice.message) for choice in reply.choices]
        texts = [""] * self.body.get("n", 1)
        async with reply:
            number = 0
            async for chunk in reply:
                for choice in chunk.choices:
                    texts[choice.index] += _said(choice.delta)
                number += 1
                if number == stop_after:
                    break
        return texts


@dataclass(frozen=True)
class Completion:
    """A prompt of text over /v1/completions, echoed."""

    body: dict[str, Any]
    kind: str = "completion"

    async def answers(self, clients: Clients, stop_after: int | None = None) -> list[str]:
        """See Request."""
        del stop_after
        return [choice.text for choice in (await clients.openai.completions.create(**self.body)).choices]


@dataclass(frozen=True)
class Response:
    """A chat over /v1/responses."""

    body: dict[str, Any]
    kind: str = "Responses"

    async def answers(self, clients: Clients, stop_after: int | None = None) -> list[str]:
        """See Request."""
        async with await clients.openai.responses.create(**self.body, stream=True) as reply:
            text, number = "", 0
            async for event in reply:
                text += event.delta if event.type == "response.output_text.delta" else ""
                number += 1
                if number == stop_after:
                    break
        return [text]


@dataclass(frozen=True)
class Message:
    """A chat over Anthropic's /v1/messages."""

    body: dict[str, Any]
    kind: str = "Messages"

    async def answers(self, clients: Clients, stop_after: int | None = None) -> list[str]:
        """See Request."""
        async with clients.anthropic.messages.stream(**self.body) as reply:
            text, number = "", 0
            async for part in reply.text_stream:
                text += part
                number += 1
                if number == stop_after:
                    break
        return [text]


def catalogue(model: str, draw: random.Random) -> list[Request]:
    """Return requests of every kind."""
    album = [random_image(draw.choice((64, 96, 128, 192)), draw.choice((64, 96, 128)), seed) for seed in range(IMAGES)]
    films = [clip(width=32 * (1 + seed % 3), num_frames=8 + seed, fps=8) for seed in range(VIDEOS)]
    requests: list[Request] = []
    for _ in range(REQUESTS):
        words = f"Number {draw.randrange(40)}. {draw.choice(QUESTIONS)}"
        way = draw.random()
        if way < 0.7:
            requests.append(_chat(model, draw, draw.sample(album, draw.choice((0, 1, 1, 1, 2, 3))), words))
        elif way < 0.8:
            requests.append(_video(model, draw, draw.choice(films), words))
        else:
            requests.append(_other(model, draw, draw.choice(album), words))
    return requests


def _chat(model: str, draw: random.Random, images: list[Image.Image], words: str) -> Chat:
    body: dict[str, Any] = {
        "model": model,
        "messages": openai_messages(*images, words),
        "max_tokens": draw.choice((4, 16, 48, 160)),
        "stream": draw.random() < 0.5,
        "extra_body": {"ignore_eos": draw.random() < 0.6},
        "temperature": 0,
    }
    kind = [f"{len(images)} images" if images else "text", "greedy"]
    if draw.random() < 0.4:
        body |= {"temperature": draw.choice((0.7, 1.0)), "top_p": 0.95, "seed": draw.randrange(1 << 30)}
        kind[1] = "seeded"
        if draw.random() < 0.4:
            body["n"] = draw.choice((2, 3))
            kind.append("n > 1")
    if len(images) < 2 and draw.random() < 0.2:
        held = draw.choice(tuple(HELD))
        body |= HELD[held] | {"max_tokens": 48}
        kind.append(held)
    return Chat(body, ", ".join(kind))


def _video(model: str, draw: random.Random, film: bytes, words: str) -> Chat:
    url = "data:video/mp4;base64," + base64.b64encode(film).decode()
    content = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": words}]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": draw.choice((4, 48)),
        "stream": draw.random() < 0.5,
        "temperature": 0,
    }
    return Chat(body, "a video")


def _other(model: str, draw: random.Random, shown: Image.Image, words: str) -> Request:
    content: list[dict[str, Any]]
    max_tokens = draw.choice((4, 48))
    match draw.randrange(3):
        case 0:
            echoed = {"echo": True, "logprobs": 1, "temperature": 0}
            return Completion({"model": model, "prompt": words, "max_tokens": max_tokens, **echoed})
        case 1:
            content = [{"type": "input_image", "image_url": data_url(shown)}, {"type": "input_text", "text": words}]
            asked = {"input": [{"role": "user", "content": content}], "max_output_tokens": max_tokens}
            return Response({"model": model, **asked, "temperature": 0})
        case _:
            data = data_url(shown).partition(",")[2]
            source = {"type": "base64", "media_type": "image/png", "data": data}
            content = [{"type": "image", "source": source}, {"type": "text", "text": words}]
            asked = {"messages": [{"role": "user", "content": content}], "max_tokens": max_tokens}
            return Message({"model": model, **asked, "extra_body": {"temperature": 0}})


def _said(part: Any) -> str:
    """Return the text and the calls of a message, or of a part of one."""
    calls = (call.function for call in part.tool_calls or ())
    return (part.content or "") + "".join((call.name or "") + (call.arguments or "") for call in calls)

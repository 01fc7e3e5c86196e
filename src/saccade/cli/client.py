"""Asks a server through the openai SDK, and streams answers with their times."""

import base64
import mimetypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rich.console import Console

if TYPE_CHECKING:
    import openai
    from openai.types.chat import ChatCompletionMessageParam

DEFAULT_URL = "http://127.0.0.1:8000/v1"


@dataclass(frozen=True)
class TimedAnswer:
    """A streamed answer. *ttft_ms* is the time to the first text, *tokens_per_second* the rate after that.

    Its str() is one line of figures: `TTFT 41 ms, 87 tokens/s, 92 tokens in the prompt, 80 of them cached`.
    Cached tokens are left out if there are none.
    """

    text: str
    ttft_ms: float
    tokens_per_second: float
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def __str__(self) -> str:
        rate = f"{self.tokens_per_second:.0f} tokens/s" if self.tokens_per_second else "one token"
        cached = f", {self.cached_tokens} of them cached" if self.cached_tokens else ""
        return f"TTFT {self.ttft_ms:.0f} ms, {rate}, {self.prompt_tokens} tokens in the prompt{cached}"


def data_url(content: bytes, media_type: str = "image/png") -> str:
    """Return *content* as a `data:` URL."""
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def user_message(media: Sequence[str], question: str) -> "ChatCompletionMessageParam":
    """Return a user's message: the *media*, as URLs of images, PDFs or videos, then the question."""
    types = [mimetypes.guess_type(url)[0] or "" for url in media]
    kinds = ["video_url" if media_type.startswith("video/") else "image_url" for media_type in types]
    parts = [{"type": kind, kind: {"url": url}} for kind, url in zip(kinds, media, strict=True)]
    # The SDK has no type for videos.
    message = {"role": "user", "content": [*parts, {"type": "text", "text": question}]}
    return cast("ChatCompletionMessageParam", message)


def stream_answer(
    client: "openai.OpenAI",
    model: str,
    messages: list["ChatCompletionMessageParam"],
    show: Callable[[str], None],
    **options: object,
) -> TimedAnswer:
    """Call *show* with each piece of the answer as it arrives; return the whole answer. Raises openai.APIError.

    *options* are further fields of the request: `max_tokens=16`.
    """
    start = time.perf_counter()
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=options,
    )
    text, first, last, usage = "", 0.0, 0.0, None
    for chunk in stream:
        if piece := (chunk.choices[0].delta.content if chunk.choices else None):
            last = time.perf_counter()
            first = first or last
            text += piece
            show(piece)
        usage = chunk.usage or usage
    num_tokens = usage.completion_tokens if usage else 0
    rate = (num_tokens - 1) / (last - first) if last > first else 0.0
    details = usage.prompt_tokens_details if usage else None
    cached = (details.cached_tokens or 0) if details else 0
    return TimedAnswer(text, max(0.0, first - start) * 1000, rate, usage.prompt_tokens if usage else 0, cached)


def about(image: Path, question: str) -> list["ChatCompletionMessageParam"]:
    """Return the messages that ask *question* about the file *image*."""
    return [user_message([data_url(image.read_bytes())], question)]


def ask_about(
    client: "openai.OpenAI", model: str, image: Path, question: str, console: Console, choices: Sequence[str] = ()
) -> TimedAnswer:
    """Ask *question* about *image* and print the answer as it streams. With *choices* the answer is one of them."""

    def show(piece: str) -> None:
        console.print(piece, end="", style="bold green", markup=False, highlight=False)

    options = {"structured_outputs": {"choice": list(choices)}} if choices else {}
    return stream_answer(client, model, about(image, question), show, **options)

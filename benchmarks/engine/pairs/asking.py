"""Asking a server one row over HTTP: whole seconds, seconds to the first token, and seconds between tokens.

A token counts when it is made, even if it has no text yet: vLLM and Saccade send token ids with every delta if asked.
llama.cpp sends none, but its own times with the end of an answer.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp

from benchmarks.engine.load import TIMEOUT_SECONDS, events, random_png
from benchmarks.engine.pairs.rows import Row
from benchmarks.measured import MODEL, png_url

SAME_IMAGE = 999_999_937
"""The number of the image that every request has in a row with one image."""


@dataclass(frozen=True)
class Times:
    """Seconds of all clients' answers together, and of one: to its first token, and between its tokens (means)."""

    whole: float
    first: float
    each: float


def question(number: int) -> str:
    """Return the text of request *number*."""
    return f"Request {number}: describe in detail."


def image_number(row: Row, number: int) -> int:
    """Return the number that the image of request *number* is drawn from."""
    return SAME_IMAGE if row.same else number


def body(row: Row, number: int) -> bytes:
    """Return request *number* as JSON."""
    content: list[dict[str, Any]] = [{"type": "text", "text": question(number)}]
    if row.size is not None:
        url = png_url(random_png(image_number(row, number), *row.size))
        content.insert(0, {"type": "image_url", "image_url": {"url": url}})
    request = {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": row.num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    return json.dumps(request).encode()


def ask(url: str, row: Row, number: int) -> Times:
    """Ask for *row* with requests from *number* on. Raises RuntimeError if an answer is refused or is too short."""
    return asyncio.run(_ask_all(url, row, [body(row, number + client) for client in range(row.num_clients)]))


async def _ask_all(url: str, row: Row, bodies: Sequence[bytes]) -> Times:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout, read_bufsize=1 << 20) as session:
        begun = time.perf_counter()
        answers = await asyncio.gather(*(_ask_one(session, url, row, content) for content in bodies))
        return mean_times(time.perf_counter() - begun, answers)


def mean_times(whole: float, answers: Sequence[tuple[float, float]]) -> Times:
    """Return *whole*, and the means of the *answers*' seconds to the first token and between tokens."""
    first, each = (sum(column) / len(answers) for column in zip(*answers, strict=True))
    return Times(whole, first, each)


async def _ask_one(session: aiohttp.ClientSession, url: str, row: Row, content: bytes) -> tuple[float, float]:
    """Return the seconds to the first token, and between tokens."""
    # llama.cpp closes its connection after each answer.
    headers = {"content-type": "application/json", "connection": "close"}
    begun = time.perf_counter()
    first = last = 0.0
    end: dict[str, Any] = {}
    async with session.post(f"{url}/v1/chat/completions", data=content, headers=headers) as response:
        if not response.ok:
            raise RuntimeError(f"{url}: {response.status} {(await response.text())[:300]}")
        async for event in events(response):
            end |= {name: event[name] for name in ("usage", "timings") if event.get(name)}
            if any(choice.get("token_ids") for choice in event.get("choices", ())):
                last = time.perf_counter()
                first = first or last
    num_tokens = end.get("usage", {}).get("completion_tokens")
    if num_tokens != row.num_tokens:
        raise RuntimeError(f"{url}: {num_tokens} tokens instead of {row.num_tokens}")
    if first:
        return first - begun, (last - first) / (row.num_tokens - 1)
    return _own_times(end["timings"])


def _own_times(timings: Mapping[str, float]) -> tuple[float, float]:
    """Return llama.cpp's own times: of the prompt with its images, and of each token."""
    return timings["prompt_ms"] / 1000, timings["predicted_per_token_ms"] / 1000


def as_json(times: Times) -> dict[str, float]:
    """Return *times* with three digits behind the point."""
    return {name: round(seconds, 3) for name, seconds in asdict(times).items()}

"""The load: `python -m benchmarks.engine.load '{"url": ..., ...}'` keeps as many streams open as it has clients.

Every request is made before the clock starts; its image is drawn from its number, so that no cache of either side has
seen it, unless *same* asks for one image every time. Greedy, ends of sequence ignored. TTFT ends with the first text
(or the end of an answer without any), TPOT is the mean gap between the tokens behind it. "warm" on standard error says
that the measured part begins; one JSON object on standard output ends it.
"""

import asyncio
import io
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp
import numpy as np
import psutil
import uvloop
from PIL import Image

from benchmarks.gateway.load import percentile, tree_seconds
from benchmarks.measured import png_url

TIMEOUT_SECONDS = 600
DATA = b"data: "
CELL = 16
WARM_UP_NUMBER = 1_000_000
"""Warm-up requests take their numbers from here on: the measured ones are unknown to every cache."""


@dataclass(frozen=True)
class Load:
    """What to ask of the server whose process tree starts at *server_pid*. *first_number* differs from row to row."""

    url: str
    model: str
    num_clients: int
    num_requests: int
    num_warmup: int
    first_number: int
    output_tokens: int
    size: Sequence[int] | None = None
    same: bool = False
    server_pid: int = 0


@dataclass(frozen=True)
class Usage:
    """CPU seconds since the start of each: the machine but for its idle time, the server with all below it, us."""

    busy: float
    server: float
    client: float

    @classmethod
    def now(cls, load: Load) -> "Usage":
        """Read all of them."""
        times, ours = psutil.cpu_times(), resource.getrusage(resource.RUSAGE_SELF)
        busy = times.user + times.nice + times.system + times.irq + times.softirq + times.steal
        return cls(busy, tree_seconds(load.server_pid), ours.ru_utime + ours.ru_stime)


@dataclass(frozen=True)
class Answer:
    """Seconds to the first text and between tokens, and the server's own counts."""

    ttft: float
    tpot: float
    output_tokens: int
    prompt_tokens: int
    cached_tokens: int


def question(number: int) -> str:
    """Return the text of request *number*."""
    return f"Request {number}: say what the image shows, in detail."


def random_png(number: int, width: int, height: int) -> bytes:
    """Return a PNG of smooth noise, the same one for the same number in every run."""
    cells = np.random.default_rng(number).integers(0, 256, (height // CELL + 1, width // CELL + 1, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(cells).resize((width, height), Image.Resampling.BICUBIC).save(buffer, "PNG")
    return buffer.getvalue()


def image_number(number: int, first: int, *, same: bool) -> int:
    """Return the number that the image of request *number* is drawn from."""
    return first if same else number


def body(load: Load, number: int) -> bytes:
    """Return request *number* as JSON."""
    content: list[dict[str, Any]] = [{"type": "text", "text": question(number)}]
    if load.size is not None:
        png = random_png(image_number(number, load.first_number, same=load.same), *load.size)
        content.insert(0, {"type": "image_url", "image_url": {"url": png_url(png)}})
    request = {
        "model": load.model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": load.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(request).encode()


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Yield the chunks of a streamed answer."""
    async for line in response.content:
        if line.startswith(DATA) and not line.startswith(DATA + b"[DONE]"):
            yield json.loads(line[len(DATA) :])


async def ask(session: aiohttp.ClientSession, url: str, content: bytes, output_tokens: int) -> Answer:
    """Stream one answer. Raises RuntimeError where it is refused, or has another length than was asked for."""
    begun = time.perf_counter()
    first = last = 0.0
    usage: dict[str, Any] = {}
    headers = {"content-type": "application/json"}
    async with session.post(f"{url}/v1/chat/completions", data=content, headers=headers) as response:
        if not response.ok:
            raise RuntimeError(f"{response.status} {(await response.text())[:200]}")
        async for event in events(response):
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                if choice["delta"].get("content") or choice.get("finish_reason"):
                    last = time.perf_counter()
                    first = first or last
    if usage.get("completion_tokens") != output_tokens:
        raise RuntimeError(f"{usage.get('completion_tokens')} tokens instead of {output_tokens}")
    cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    tpot = (last - first) / (output_tokens - 1)
    return Answer(first - begun, tpot, output_tokens, usage["prompt_tokens"], cached_tokens)


async def run(session: aiohttp.ClientSession, load: Load, bodies: Sequence[bytes]) -> list[Answer]:
    """Ask all *bodies*, as many at a time as there are clients."""
    left: Iterator[bytes] = iter(bodies)
    answers: list[Answer] = []

    async def client() -> None:
        for content in left:
            answers.append(await ask(session, load.url, content, load.output_tokens))

    await asyncio.gather(*(client() for _ in range(load.num_clients)))
    return answers


def report(answers: Sequence[Answer], before: Usage, after: Usage, wall_seconds: float) -> dict[str, Any]:
    """Return the row's figures; *foreign* is everybody else's part of the machine."""
    used = {name: getattr(after, name) - getattr(before, name) for name in asdict(before)}
    foreign = used["busy"] - used["server"] - used["client"]
    cores = os.cpu_count() or 1
    return {
        "requests": len(answers),
        **latencies([answer.ttft for answer in answers], [answer.tpot for answer in answers]),
        "requests_per_second": round(len(answers) / wall_seconds, 2),
        "output_tokens_per_second": round(sum(answer.output_tokens for answer in answers) / wall_seconds, 1),
        "server_cpu_ms": round(1000 * used["server"] / len(answers), 1),
        "client_cpu_ms": round(1000 * used["client"] / len(answers), 1),
        "prompt_tokens": statistics.median(answer.prompt_tokens for answer in answers),
        "cached_tokens": sum(answer.cached_tokens for answer in answers),
        "foreign_cpu": round(max(0.0, foreign) / wall_seconds / cores, 3),
        "load_average": round(os.getloadavg()[0], 2),
    }


def latencies(ttft: Sequence[float], tpot: Sequence[float]) -> dict[str, float | None]:
    """Return TTFT's percentiles and the mean TPOT in ms, from seconds per request."""
    to_first = [1000 * seconds for seconds in ttft]
    return {
        "ttft_p50_ms": percentile(to_first, 50),
        "ttft_p95_ms": percentile(to_first, 95),
        "tpot_mean_ms": round(1000 * statistics.mean(tpot), 2),
    }


async def measure(load: Load) -> dict[str, Any]:
    """Warm up, then measure."""
    warmup = [body(load, WARM_UP_NUMBER + load.first_number + number) for number in range(load.num_warmup)]
    bodies = [body(load, load.first_number + number) for number in range(load.num_requests)]
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=1 << 20) as session:
        await run(session, load, warmup)
        print("warm", file=sys.stderr, flush=True)
        before, begun = Usage.now(load), time.monotonic()
        answers = await run(session, load, bodies)
        wall_seconds, after = time.monotonic() - begun, Usage.now(load)
    return report(answers, before, after, wall_seconds)


if __name__ == "__main__":
    print(json.dumps(uvloop.run(measure(Load(**json.loads(sys.argv[1]))))))

"""The load: `python -m benchmarks.gateway.load '{"url": ..., ...}'` keeps as many requests open as it has clients.

What is measured is the time from the moment before a request is written to the moment at which the worker had it, and
what the processes of gateway, worker and this program used meanwhile. One JSON object on standard output.
"""

import asyncio
import base64
import collections
import itertools
import json
import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import uvloop

from benchmarks.gateway.receipt import RECEIPT, now_ns

TIMEOUT_SECONDS = 300
KEEP_ALIVE_SECONDS = 2.0
"""Less than any server's: a connection that the server has just closed cannot be used again."""

QUESTION = "Describe image {} in one sentence."


@dataclass(frozen=True)
class Load:
    """*num_requests* are measured after *num_warmup* others; with *seconds*, as many as fit into them.

    Answers are streamed with *stream_tokens* tokens each, where that is not 0. With *per_second*, requests begin at
    this rate as long as a client is free. Without *receipts* the workers are not ours: they say not when they got it.
    """

    url: str
    model: str
    num_clients: int
    num_requests: int
    num_warmup: int
    images: Sequence[str] = ()
    seconds: float = 0.0
    gateway_pid: int = 0
    worker_pid: int = 0
    stream_tokens: int = 0
    per_second: float = 0.0
    max_tokens: int = 64
    receipts: bool = True


@dataclass
class Outcome:
    """Milliseconds of every request, and the errors by what they were."""

    receipt_ms: list[float] = field(default_factory=list)
    round_trip_ms: list[float] = field(default_factory=list)
    message_bytes: list[int] = field(default_factory=list)
    num_tokens: int = 0
    errors: collections.Counter[str] = field(default_factory=collections.Counter)


@dataclass(frozen=True)
class Usage:
    """CPU seconds since the start of each: the machine, its idle time, gateway and worker with all below them, us."""

    busy: float
    gateway: float
    worker: float
    client: float

    @classmethod
    def now(cls, load: Load) -> "Usage":
        """Read all of them."""
        times = psutil.cpu_times()
        ours = resource.getrusage(resource.RUSAGE_SELF)
        return cls(
            busy=sum(times[: len(times) - 2]) - times.idle - getattr(times, "iowait", 0.0),
            gateway=tree_seconds(load.gateway_pid),
            worker=tree_seconds(load.worker_pid),
            client=ours.ru_utime + ours.ru_stime,
        )


def tree_seconds(pid: int) -> float:
    """Return the CPU seconds of the process *pid* and all that live below it."""
    if not pid:
        return 0.0
    root = psutil.Process(pid)
    return sum(used.user + used.system for used in (one.cpu_times() for one in [root, *root.children(recursive=True)]))


def bodies(load: Load) -> list[bytes]:
    """Return one request for each image, or one without any."""
    urls = [f"data:image/jpeg;base64,{base64.b64encode(Path(path).read_bytes()).decode()}" for path in load.images]
    images: list[list[Mapping[str, Any]]] = [[{"type": "image_url", "image_url": {"url": url}}] for url in urls]
    requests = []
    for number, image in enumerate(images or [[]]):
        content = [*image, {"type": "text", "text": QUESTION.format(number)}]
        messages = [{"role": "user", "content": content}]
        request = {"model": load.model, "messages": messages, "max_tokens": load.max_tokens, "temperature": 0}
        if load.stream_tokens:
            request |= {"max_tokens": load.stream_tokens, "ignore_eos": True, "stream": True}
            request |= {"stream_options": {"include_usage": True}}
        requests.append(request)
    return [json.dumps(request).encode() for request in requests]


class Clients:
    """Asks one request after the other in each of num_clients tasks."""

    def __init__(self, load: Load, session: aiohttp.ClientSession) -> None:
        self._load = load
        self._session = session
        self._bodies = bodies(load)
        self._next_at = 0.0

    async def run(self, numbers: Iterator[int], outcome: Outcome) -> None:
        """Ask the requests of those *numbers*; all clients draw from the same."""
        await asyncio.gather(*(self._client(numbers, outcome) for _ in range(self._load.num_clients)))

    async def _client(self, numbers: Iterator[int], outcome: Outcome) -> None:
        for number in numbers:
            if self._load.per_second:
                now = time.monotonic()
                self._next_at = max(now, self._next_at + 1 / self._load.per_second)
                await asyncio.sleep(self._next_at - now)
            await self._ask(self._bodies[number % len(self._bodies)], outcome)

    async def _ask(self, body: bytes, outcome: Outcome) -> None:
        begun_ns = now_ns()
        try:
            async with self._session.post(
                f"{self._load.url}/v1/chat/completions", data=body, headers={"content-type": "application/json"}
            ) as response:
                content = await response.read()
        except aiohttp.ClientError as error:
            outcome.errors[type(error).__name__] += 1
            return
        ended_ns = now_ns()
        text, num_tokens = _answered(content, is_streamed=self._load.stream_tokens > 0) if response.ok else ("", 0)
        if response.ok and not self._load.receipts:
            text = f"t={begun_ns} n=0"
        receipt = RECEIPT.search(text)
        if receipt is None:
            outcome.errors[f"{response.status} {content[:200].decode(errors='replace')}"] += 1
            return
        outcome.receipt_ms.append((int(receipt[1]) - begun_ns) / 1e6)
        outcome.round_trip_ms.append((ended_ns - begun_ns) / 1e6)
        outcome.message_bytes.append(int(receipt[2]))
        outcome.num_tokens += num_tokens


def _answered(content: bytes, *, is_streamed: bool) -> tuple[str, int]:
    """Return the text of an answer, and how many tokens it has."""
    if not is_streamed:
        answer = json.loads(content)
        return answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"]
    lines = (line.removeprefix(b"data: ") for line in content.splitlines() if line.startswith(b"data: {"))
    text, num_tokens = "", 0
    for event in map(json.loads, lines):
        text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
    return text, num_tokens


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return the nearest-rank percentile, None of nothing."""
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, round(percent / 100 * (len(ordered) - 1)))], 2) if ordered else None


def numbers_of(load: Load) -> Iterator[int]:
    """Yield the numbers of the requests to measure."""
    if not load.seconds:
        yield from range(load.num_requests)
        return
    end = time.monotonic() + load.seconds
    for number in itertools.count():
        if time.monotonic() >= end:
            return
        yield number


def report(outcome: Outcome, before: Usage, after: Usage, wall_seconds: float, is_streamed: bool) -> dict[str, Any]:
    """Return the row's figures. CPU is per answered request; *foreign* is everybody else's part of the machine."""
    count = max(1, len(outcome.receipt_ms))
    used = {name: getattr(after, name) - getattr(before, name) for name in asdict(before)}
    foreign = used["busy"] - used["gateway"] - used["worker"] - used["client"]
    latency = {
        f"{name}_p{percent}_ms": percentile(getattr(outcome, f"{name}_ms"), percent)
        for name in ("receipt", "round_trip")
        for percent in (50, 90, 99)
    }
    cpu = {f"{name}_cpu_ms": round(1000 * used[name] / count, 2) for name in ("gateway", "worker", "client")}
    if outcome.num_tokens and is_streamed:
        cpu["gateway_cpu_us_per_token"] = round(1e6 * used["gateway"] / outcome.num_tokens, 1)
        cpu["tokens_per_second"] = round(outcome.num_tokens / wall_seconds)
    return {
        "requests": len(outcome.receipt_ms),
        "errors": dict(outcome.errors),
        "requests_per_second": round(len(outcome.receipt_ms) / wall_seconds, 2),
        **latency,
        **cpu,
        "message_bytes": sum(outcome.message_bytes) // count,
        "machine_busy": round(used["busy"] / wall_seconds / (os.cpu_count() or 1), 3),
        "foreign_cpu": round(max(0.0, foreign) / wall_seconds / (os.cpu_count() or 1), 3),
    }


async def measure(load: Load) -> dict[str, Any]:
    """Warm up, then measure."""
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS), timeout=timeout
    ) as session:
        clients = Clients(load, session)
        await clients.run(iter(range(load.num_warmup)), Outcome())
        print("warm", file=sys.stderr, flush=True)
        outcome = Outcome()
        before, begun = Usage.now(load), time.monotonic()
        await clients.run(numbers_of(load), outcome)
        wall_seconds, after = time.monotonic() - begun, Usage.now(load)
    return report(outcome, before, after, wall_seconds, load.stream_tokens > 0)


if __name__ == "__main__":
    print(json.dumps(uvloop.run(measure(Load(**json.loads(sys.argv[1]))))))

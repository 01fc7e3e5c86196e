"""Soak: a real server, mixed requests with aborts, small caches; every answer equals the quiet run's, memory is flat.

    python -m benchmarks.reliability.soak [--minutes 30] [--out benchmarks/results/soak.md]

The bundled model in float32. A catalogue of requests is asked one by one first, and the answers are kept; then clients
ask at random for --minutes, leave some requests half-way, and compare every answer that they wait for. The KV pool, the
encoder cache and the caches of the gateway are small, so that blocks are evicted, sequences retracted, pictures encoded
and decoded again: the server's metrics must show it. The exit status is 1 where an answer differs, a request fails, a
process was replaced, or memory, descriptors or /dev/shm grow over the second half.
"""

import argparse
import asyncio
import contextlib
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
from chats import openai_messages, picture
from server import Server, serving

from benchmarks.measured import MIB, ROOT, end_with_what_was_started
from benchmarks.reliability import soak_report
from benchmarks.reliability.processes import Holdings, holdings, provenance

SERVER_FLAGS = (
    *("--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "10", "--max-num-batched-tokens", "256"),
    # So that pictures are encoded beside the steps of others.
    *("--threads", "2"),
    *("--kv-cache-memory-bytes", str(5 * MIB // 2), "--encoder-cache-bytes", str(MIB)),
    *("--mm-processor-cache-gb", "0.002", "--shared-memory-bytes", str(8 * MIB)),
)
CLIENTS = 12
REQUESTS = 240
PICTURES = 60
SAMPLE_SECONDS = 5.0
PROBABILITY_OF_LEAVING = 0.15
QUESTIONS = ("What does it say?", "What colour is it?", "What shape is it?", "Compare them, and go on.")


@dataclass(frozen=True)
class Request:
    """One request of the catalogue: its body. Asked again, it gives the same answers."""

    body: dict[str, Any]

    async def answers(self, client: openai.AsyncOpenAI, stop_after: int | None = None) -> list[str]:
        """Return the texts of the samples, as far as they came until the client left after *stop_after* chunks."""
        reply = await client.chat.completions.create(**self.body)
        if not self.body["stream"]:
            return [choice.message.content or "" for choice in reply.choices]
        texts = [""] * self.body.get("n", 1)
        async with reply:
            number = 0
            async for chunk in reply:
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
                number += 1
                if number == stop_after:
                    break
        return texts

    @property
    def kind(self) -> str:
        """What it is, in words, for the count of what was asked."""
        parts = self.body["messages"][-1]["content"]
        pictures = sum(part["type"] == "image_url" for part in parts)
        words = [f"{pictures} pictures" if pictures else "text", "greedy" if "seed" not in self.body else "seeded"]
        return ", ".join([*words, *(["n > 1"] if "n" in self.body else [])])


@dataclass
class Tally:
    """What happened: by kind of request what was asked, what came of it, and what must not be."""

    asked: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Soak:
    """One run: the catalogue and what the quiet server answered, request by request."""

    server: Server
    client: openai.AsyncOpenAI
    requests: list[Request]
    quiet: list[list[str]]
    tally: Tally

    async def one_client(self, until: float, draw: random.Random) -> None:
        """Ask at random until then."""
        while time.monotonic() < until:
            index = draw.randrange(len(self.requests))
            self.tally.asked[self.requests[index].kind] += 1
            try:
                if draw.random() < PROBABILITY_OF_LEAVING:
                    await self._leave(self.requests[index], draw)
                else:
                    await self._compare(index)
            except openai.APIError as error:
                self.tally.outcomes["failed"] += 1
                self.tally.violations.append(
                    f"request {index} ({self.requests[index].kind}): {type(error).__name__} {error}"
                )

    async def _leave(self, request: Request, draw: random.Random) -> None:
        self.tally.outcomes["left half-way"] += 1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if request.body["stream"] else draw.uniform(0.0, 0.5)):
                await request.answers(self.client, stop_after=draw.randrange(1, 20))

    async def _compare(self, index: int) -> None:
        request, expected = self.requests[index], self.quiet[index]
        texts = await request.answers(self.client)
        if texts == expected:
            self.tally.outcomes["equal"] += 1
            return
        self.tally.outcomes["different"] += 1
        gap = await self._gap(request, expected, texts)
        self.tally.violations.append(f"request {index} ({request.kind}): {texts!r} instead of {expected!r}; {gap}")

    async def _gap(self, request: Request, expected: list[str], texts: list[str]) -> str:
        """Return how close the two likeliest tokens are where the answers part: a tie is no lost picture."""
        try:
            body = request.body | {"stream": False, "logprobs": True, "top_logprobs": 2}
            answer = await self.client.chat.completions.create(**body)
        except openai.APIError as error:
            return f"log probabilities are not to be had ({type(error).__name__})"
        sample = next(number for number, pair in enumerate(zip(expected, texts, strict=True)) if pair[0] != pair[1])
        text = ""
        for token in answer.choices[sample].logprobs.content:
            text += token.token
            if not texts[sample].startswith(text) or not expected[sample].startswith(text):
                first, second = (top.logprob for top in token.top_logprobs)
                return f"they part at {token.token!r}, where the likeliest two are {first - second:.2e} apart"
        return "they part behind the last token"


def catalogue(model: str, draw: random.Random, samples: bool) -> list[Request]:
    """Return requests of every kind; *samples* tells whether the server draws several of one prompt."""
    album = [picture(draw.choice((64, 96, 128, 192)), draw.choice((64, 96, 128)), seed) for seed in range(PICTURES)]
    requests = []
    for _ in range(REQUESTS):
        pictures = draw.sample(album, draw.choice((0, 1, 1, 1, 2, 3)))
        words = f"Number {draw.randrange(40)}. {draw.choice(QUESTIONS)}"
        body: dict[str, Any] = {
            "model": model,
            "messages": openai_messages(*pictures, words),
            "max_tokens": draw.choice((4, 16, 48, 160)),
            "stream": draw.random() < 0.5,
            "extra_body": {"ignore_eos": draw.random() < 0.6},
            "temperature": 0,
        }
        if draw.random() < 0.4:
            body |= {"temperature": draw.choice((0.7, 1.0)), "top_p": 0.95, "seed": draw.randrange(1 << 30)}
            if samples and draw.random() < 0.4:
                body["n"] = draw.choice((2, 3))
        requests.append(Request(body))
    return requests


async def takes_samples(client: openai.AsyncOpenAI, model: str) -> bool:
    """Whether the server serves n > 1."""
    try:
        await client.chat.completions.create(model=model, messages=openai_messages("hi"), n=2, max_tokens=1)
    except openai.BadRequestError:
        return False
    return True


async def run(server: Server, seconds: float, seed: int) -> tuple[Tally, list[Holdings]]:
    """Ask one by one, then for *seconds* at random; return what happened, and what was held every few seconds."""
    looks: list[Holdings] = []

    async def look() -> None:
        began = time.monotonic()
        while True:
            looks.append(await asyncio.to_thread(holdings, server, time.monotonic() - began))
            await asyncio.sleep(SAMPLE_SECONDS)

    url = f"{server.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        requests = catalogue(server.name, random.Random(seed), await takes_samples(client, server.name))
        quiet = [await request.answers(client) for request in requests]
        soak = Soak(server, client, requests, quiet, Tally())
        pids = {process.pid for process in server.tree()}
        looking = asyncio.create_task(look())
        until = time.monotonic() + seconds
        await asyncio.gather(*(soak.one_client(until, random.Random(seed + n)) for n in range(1, CLIENTS + 1)))
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        if {process.pid for process in server.tree()} != pids:
            soak.tally.violations.append("a process was replaced")
    return soak.tally, looks


def main() -> int:
    """Run, write the report, return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/soak.md")
    arguments = parser.parse_args()
    end_with_what_was_started()
    with serving(*SERVER_FLAGS) as server:
        tally, looks = asyncio.run(run(server, 60 * arguments.minutes, arguments.seed))
        metrics = {name: server.settled(name) for name in soak_report.METRICS}
        tree = server.tree()
        idle = {name: server.metric(name) for name in soak_report.MUST_BE_ZERO}
    tally.violations += soak_report.violations(metrics, idle, looks)
    if server.process.returncode or any(process.is_running() for process in tree):
        tally.violations.append(f"the server ended with {server.process.returncode}, or left a process")
    report = soak_report.report(arguments.minutes, tally.asked, tally.outcomes, metrics, looks, tally.violations)
    text = (
        "\n".join(["# Soak", "", *provenance(), f"- server: `saccade serve {' '.join(SERVER_FLAGS)}`", *report]) + "\n"
    )
    arguments.out.write_text(text)
    print(text)
    return 1 if tally.violations else 0


if __name__ == "__main__":
    sys.exit(main())

"""Soak: a real server, mixed requests with aborts, small caches; every answer equals the quiet run's, memory is flat.

    python -m benchmarks.reliability.soak [--minutes 30] [--trace-sample 1] [--out benchmarks/results/soak.md]

The bundled model in float32. The catalogue of soak_requests.py is asked one by one first, and the answers are kept;
then clients ask at random for --minutes, leave some requests half-way, and compare every answer that they wait for. The
KV pool, the encoder cache and the caches of the gateway are small, so that blocks are evicted, sequences preempted,
images encoded and decoded again: the server's metrics must show it. The exit status is 1 if an answer differs, a
request fails, a process other than a decode process was replaced, or memory, descriptors or /dev/shm grow over the
second half. With --trace-sample the server sends traces of this part of the requests to a collector in this process.
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

import anthropic
import openai
from server import Server, serving

from benchmarks.measured import MIB, ROOT, end_with_what_was_started
from benchmarks.reliability import soak_report
from benchmarks.reliability.processes import Holdings, holdings, provenance, traces
from benchmarks.reliability.siege_watch import pids
from benchmarks.reliability.soak_requests import Chat, Clients, Request, catalogue

SERVER_FLAGS = (
    *("--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "10", "--max-num-batched-tokens", "256"),
    *("--threads", "2"),
    *("--kv-cache-memory-bytes", str(5 * MIB // 2), "--encoder-cache-bytes", str(MIB)),
    *("--mm-processor-cache-gb", "0.002", "--shared-memory-bytes", str(8 * MIB)),
    *("--response-store-bytes", str(2 * MIB)),
)
CLIENTS = 12
SAMPLE_SECONDS = 5.0
PROBABILITY_OF_LEAVING = 0.15


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
    clients: Clients
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
            except (openai.APIError, anthropic.APIError) as error:
                self.tally.outcomes["failed"] += 1
                self.tally.violations.append(
                    f"request {index} ({self.requests[index].kind}): {type(error).__name__} {error}"
                )

    async def _leave(self, request: Request, draw: random.Random) -> None:
        self.tally.outcomes["left half-way"] += 1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(draw.uniform(0.0, 0.5) if draw.random() < 0.5 else None):
                await request.answers(self.clients, stop_after=draw.randrange(1, 20))

    async def _compare(self, index: int) -> None:
        request, expected = self.requests[index], self.quiet[index]
        texts = await request.answers(self.clients)
        if texts == expected:
            self.tally.outcomes["equal"] += 1
            return
        self.tally.outcomes["different"] += 1
        gap = await self._gap(request, expected, texts)
        self.tally.violations.append(f"request {index} ({request.kind}): {texts!r} instead of {expected!r}; {gap}")

    async def _gap(self, request: Request, expected: list[str], texts: list[str]) -> str:
        """Return how close the two likeliest tokens are where the answers part: a tie is no lost image."""
        if not isinstance(request, Chat) or request.body.keys() & {"tools", "response_format"}:
            return "log probabilities are not asked for"
        try:
            body = request.body | {"stream": False, "logprobs": True, "top_logprobs": 2}
            answer = await self.clients.openai.chat.completions.create(**body)
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


async def run(server: Server, seconds: float, seed: int) -> tuple[Tally, list[Holdings]]:
    """Ask one by one, then for *seconds* at random; return what happened, and what was held every few seconds."""
    looks: list[Holdings] = []

    async def look() -> None:
        began = time.monotonic()
        while True:
            looks.append(await asyncio.to_thread(holdings, server, time.monotonic() - began))
            await asyncio.sleep(SAMPLE_SECONDS)

    options: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 120}
    async with (
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", **options) as to_openai,
        anthropic.AsyncAnthropic(base_url=server.url, **options) as to_anthropic,
    ):
        clients = Clients(to_openai, to_anthropic)
        requests = catalogue(server.name, random.Random(seed))
        quiet = [await request.answers(clients) for request in requests]
        soak = Soak(server, clients, requests, quiet, Tally())
        before = _lasting(server)
        looking = asyncio.create_task(look())
        until = time.monotonic() + seconds
        await asyncio.gather(*(soak.one_client(until, random.Random(seed + n)) for n in range(1, CLIENTS + 1)))
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        if _lasting(server) != before:
            soak.tally.violations.append("a process was replaced")
    return soak.tally, looks


def _lasting(server: Server) -> dict[str, set[int]]:
    """Return the processes that outlast every request: a decode process ends with the video of a client that left."""
    return {role: found for role, found in pids(server).items() if role != "decode process"}


def main() -> int:
    """Run, write the report, return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace-sample", type=float, metavar="PART", help="send traces of this part of the requests")
    parser.add_argument("--out", type=Path, help="by default benchmarks/results/soak.md, or soak-traced.md with traces")
    arguments = parser.parse_args()
    out = arguments.out or ROOT / f"benchmarks/results/soak{'' if arguments.trace_sample is None else '-traced'}.md"
    end_with_what_was_started()
    with traces(arguments.trace_sample) as traced, serving(*SERVER_FLAGS, *traced.flags) as server:
        tally, looks = asyncio.run(run(server, 60 * arguments.minutes, arguments.seed))
        metrics = {name: server.settled(name) for name in soak_report.METRICS}
        tree = server.tree()
        idle = {name: server.metric(name) for name in soak_report.MUST_BE_ZERO}
    tally.violations += soak_report.violations(metrics, idle, looks) + traced.violations()
    if server.process.returncode or any(process.is_running() for process in tree):
        tally.violations.append(f"the server ended with {server.process.returncode}, or left a process")
    report = soak_report.report(arguments.minutes, tally.asked, tally.outcomes, metrics, looks, tally.violations)
    where = [*provenance(), f"- server: `saccade serve {' '.join(SERVER_FLAGS)}`", *traced.report()]
    text = "\n".join(["# Soak", "", *where, *report]) + "\n"
    out.write_text(text)
    print(text)
    return 1 if tally.violations else 0


if __name__ == "__main__":
    sys.exit(main())

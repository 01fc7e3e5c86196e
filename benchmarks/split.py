"""Prefill/decode split: two workers as a pair, beside the same two that serve requests alone, under a mixed load.

    python -m benchmarks.split [--seconds 15] [--out benchmarks/results/split.md]

The bundled model in float32, one thread a worker. Some clients stream long answers to short texts, one after another;
one client asks about new images behind long texts, each for a few tokens. The first feel long prompts in the gaps
between their tokens, the second feels running answers in the time to its first token.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import openai

from benchmarks.measured import ROOT, commit, end_with_what_was_started, free_ports, machine, process
from saccade.cli.bundled import bundled

sys.path += [str(ROOT / "tests"), *map(str, (ROOT / "tests" / "support").iterdir())]
from chats import openai_messages, random_image

MODES = (("prefill", "decode"), ("both", "both"))
CHATS = 6
CHAT_TOKENS, QUESTION_TOKENS = 120, 4
LONG_WORDS = 350
SIDE = 320
WORDS = ("red", "green", "blue", "square", "circle", "left", "right", "above", "below", "word")
READY_SECONDS = 240.0


@dataclass
class Times:
    """Seconds: first tokens of questions, and gaps between the tokens of chats."""

    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)


@contextlib.contextmanager
def fleet(roles: tuple[str, str]) -> Iterator[str]:
    """A gateway over two workers of these roles; its url."""
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    saccade = (sys.executable, "-m", "saccade.cli.main")
    [port] = free_ports(1)
    with contextlib.ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory()))
        log = os.open(os.devnull, os.O_WRONLY)
        running.callback(os.close, log)
        urls = []
        for number, role in enumerate(roles):
            path = folder / str(number) / "w.sock"
            flags = ("--uds", str(path), "--role", role, "--dtype", "float32", "--served-model-name", "m")
            running.enter_context(process((*saccade, "worker", str(bundled("model")), *flags), log, environment))
            urls.append(f"--worker-url=unix:{path}")
        command = (*saccade, "gateway", *urls, "--port", str(port), "--decode-processes", "1")
        running.enter_context(process(command, log, environment))
        yield f"http://127.0.0.1:{port}/v1"


async def wait_until_ready(client: openai.AsyncOpenAI) -> None:
    """Wait until a chat is answered, and a little more for the second worker. Raises TimeoutError."""
    async with asyncio.timeout(READY_SECONDS):
        while True:
            with contextlib.suppress(openai.APIError):
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
                break
            await asyncio.sleep(0.5)
    await asyncio.sleep(5)


def letters(url: str) -> list[int]:
    """Return the ids of a few letters, each of which is a token with text of its own."""
    body = json.dumps({"model": "m", "prompt": "abcdefgh"}).encode()
    request = urllib.request.Request(url.replace("/v1", "/tokenize"), body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        return list(json.load(response)["tokens"])


async def stream(client: openai.AsyncOpenAI, messages: Any, max_tokens: int, ids: list[int]) -> list[float]:
    """Return the times of a chat's start and of each chunk with text. Only *ids* are drawn."""
    times = [time.perf_counter()]
    answer = await client.chat.completions.create(
        model="m",
        messages=messages,
        max_tokens=max_tokens,
        stream=True,
        temperature=1,
        extra_body={"ignore_eos": True, "allowed_token_ids": ids},
    )
    async for chunk in answer:
        if chunk.choices and chunk.choices[0].delta.content:
            times.append(time.perf_counter())
    return times


async def load(url: str, seconds: float) -> Times:
    """Ask for *seconds*."""
    times_of_run = Times()
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        await wait_until_ready(client)
        ids = await asyncio.to_thread(letters, url)
        until = time.perf_counter() + seconds

        async def chat(number: int) -> None:
            while time.perf_counter() < until:
                times = await stream(client, openai_messages(f"Tell me about {number}."), CHAT_TOKENS, ids)
                times_of_run.itl += [after - before for before, after in itertools.pairwise(times[1:])]

        async def ask() -> None:
            draw = random.Random(0)
            for seed in itertools.count(1):
                if time.perf_counter() >= until:
                    return
                text = " ".join(draw.choices(WORDS, k=LONG_WORDS))
                times = await stream(
                    client, openai_messages(random_image(SIDE, SIDE, seed), text), QUESTION_TOKENS, ids
                )
                times_of_run.ttft.append(times[1] - times[0])

        await asyncio.gather(*(chat(number) for number in range(CHATS)), ask())
    return times_of_run


def row(mode: str, times: Times) -> str:
    """A line of the table."""
    cells = [f"{1000 * np.percentile(part, q):.0f}" for part in (times.ttft, times.itl) for q in (50, 99)]
    return f"| {mode} | {len(times.ttft)} | {' | '.join(cells)} | {len(times.itl)} |"


def main() -> None:
    end_with_what_was_started()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = [
        "| workers | questions | TTFT p50, ms | TTFT p99, ms | ITL p50, ms | ITL p99, ms | gaps |",
        "|---|---|---|---|---|---|---|",
    ]
    for roles in MODES:
        with fleet(roles) as url:
            lines.append(row(f"{roles[0]} + {roles[1]}", asyncio.run(load(url, options.seconds))))
        print(lines[-1], flush=True)
    load_average = os.getloadavg()[0]
    asking = f"{CHATS} clients stream answers of {CHAT_TOKENS} tokens to short texts"
    head = [
        "# Prefill and decode on separate workers",
        "",
        f"Two workers of the bundled model, float32, one thread each, {options.seconds:.0f} s of mixed load: {asking},",
        f"one client asks about new images of {SIDE} x {SIDE} behind {LONG_WORDS} words. The model is tiny: its",
        "steps take less time than the gateway's and the wire's part.",
        "",
        f"Machine: {machine()}; load average at the end {load_average:.0f}  ",
        f"Commit: {commit()}  ",
        f"Command: python -m benchmarks.split --seconds {options.seconds:.0f}",
        "",
    ]
    if options.out is not None:
        options.out.write_text("\n".join([*head, *lines, ""]))


if __name__ == "__main__":
    main()

"""Two real vLLM workers behind Saccade's gateway and behind others: where repeated images land, and what that saves.

python -m benchmarks.peers --vllm VENV --smg SMG --vllm-router ROUTER [--images 24] [--asks 4] [--clients 4]
    [--caches 97 161] [--out FILE]

Every image is asked about several times, each time with another question, in a seeded order. What the caches must hold
for that is computed from a first answer: the full blocks of a prompt, for each image. Each system begins with empty
caches. A row says how many requests each worker had.
"""

import argparse
import asyncio
import contextlib
import io
import json
import os
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp

from benchmarks.measured import ROOT, answers, end_with_what_was_started, free_ports, png_url, process, write

sys.path += [str(ROOT / "tests"), *map(str, (ROOT / "tests" / "support").iterdir())]

from chats import random_image
from checkpoints import write_qwen3_vl
from vllm_server import BLOCK_SIZE, VllmServer, vllm

MODEL = "tiny-vlm"
SIDE = 448
IMAGE_TOKENS = (SIDE // 32) ** 2
CACHES = (97, 161)
"""Blocks of each worker's cache, of which vLLM never uses one.

24 images need 144: half as much again as the smaller holds, and less than the larger.
"""

WARM_SEED = 10_000
NUM_WARM = 3
READY_SECONDS = 180.0
SETTLE_SECONDS = 0.5
SEED = 18
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Ask:
    """A request: *number* counts the requests about this image."""

    seed: int
    number: int
    body: bytes


@dataclass(frozen=True)
class Answered:
    """*ttft_s* is the time to the first event with text, *cached* counts prompt tokens that the worker held."""

    ask: Ask
    ttft_s: float
    prompt_tokens: int
    cached: int


def asks(num_images: int, num_asks: int) -> list[Ask]:
    """Return all requests in their order: every image before it is asked about again, the rest shuffled."""
    order = [(seed, number) for seed in range(num_images) for number in range(num_asks)]
    random.Random(SEED).shuffle(order)
    counts = dict.fromkeys(range(num_images), 0)
    asks = []
    for seed, _ in order:
        asks.append(Ask(seed, counts[seed], body(seed, counts[seed])))
        counts[seed] += 1
    return asks


def body(seed: int, number: int, num_tokens: int = 4) -> bytes:
    """Return a chat of one image and a question, which asks for a stream of *num_tokens* tokens."""
    buffer = io.BytesIO()
    random_image(SIDE, SIDE, 5000 + seed).save(buffer, "PNG")
    content = [
        {"type": "image_url", "image_url": {"url": png_url(buffer.getvalue())}},
        {"type": "text", "text": f"Question {number}?"},
    ]
    chat = {"model": MODEL, "messages": [{"role": "user", "content": content}], "temperature": 0}
    chat |= {"max_tokens": num_tokens, "ignore_eos": True}
    return json.dumps({**chat, "stream": True, "stream_options": {"include_usage": True}}).encode()


async def ask(session: aiohttp.ClientSession, url: str, asked: Ask) -> Answered:
    """Send one request and read its stream."""
    began, first, usage = time.perf_counter(), 0.0, {}
    headers = {"content-type": "application/json"}
    async with session.post(f"{url}/v1/chat/completions", data=asked.body, headers=headers) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            if not first and any(_has_begun(choice) for choice in event["choices"]):
                first = time.perf_counter()
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Answered(asked, first - began, usage["prompt_tokens"], cached)


def _has_begun(choice: dict[str, Any]) -> bool:
    return bool(choice["delta"].get("content") or choice.get("finish_reason"))


async def run(url: str, all_asks: Sequence[Ask], num_clients: int) -> list[Answered]:
    """Answer all requests, *num_clients* at a time; those about one image follow one another."""
    results: list[Answered] = []
    locks = {each.seed: asyncio.Lock() for each in all_asks}
    waiting = iter(all_asks)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, read_bufsize=1 << 20) as session:

        async def client() -> None:
            for each in waiting:
                async with locks[each.seed]:
                    results.append(await ask(session, url, each))

        await asyncio.gather(*(client() for _ in range(num_clients)))
    return results


def row(system: str, num_blocks: int, requests: Sequence[int], results: Sequence[Answered]) -> dict[str, Any]:
    """Return the figures of one run, in which the workers had so many *requests*, with caches of *num_blocks* blocks.

    A repeat lands on the holder where its whole image was cached.
    """
    first, repeats = [a for a in results if not a.ask.number], [a for a in results if a.ask.number]
    whole = IMAGE_TOKENS // BLOCK_SIZE * BLOCK_SIZE
    return {
        "system": system,
        "blocks": num_blocks - 1,
        "requests by worker": "/".join(map(str, requests)),
        "repeats on the holder": round(statistics.mean(a.cached >= whole for a in repeats), 3),
        "full hits on new images": sum(a.cached >= whole for a in first),
        "cached tokens": round(sum(a.cached for a in results) / sum(a.prompt_tokens for a in results), 3),
        "TTFT mean ms": round(1000 * statistics.mean(a.ttft_s for a in results), 1),
        "TTFT mean of repeats ms": round(1000 * statistics.mean(a.ttft_s for a in repeats), 1),
    }


@contextlib.contextmanager
def gateway(
    command: Sequence[str], port: int, log: Path, environment: Mapping[str, str] = NO_VARIABLES
) -> Iterator[str]:
    """Start a gateway and yield its URL when it answers."""
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + READY_SECONDS
    with log.open("ab") as output, process(command, output.fileno(), environment) as started:
        while not answers(url):
            if started.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[0]} did not become ready:\n{log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield url


def systems(
    workers: Sequence[VllmServer], folder: Path, smg: Path | None, vllm_router: Path | None, port: int
) -> dict[str, list[str]]:
    """Return the commands of the gateways, by name."""
    ours = [str(Path(sys.executable).with_name("saccade")), "gateway", "--log-level", "WARNING", "--port", str(port)]
    ours += ["--model", f"{MODEL}={folder}"]
    for worker in workers:
        ours += ["--worker-url", f"vllm://127.0.0.1:{worker.port}"]
    systems = {
        "saccade": ours,
        "saccade, weight 1": [*ours, "--routing-recompute-weight", "1"],
        "saccade, round robin": [*ours, "--routing-policy", "round_robin"],
    }
    if smg is not None:
        (metrics_port,) = free_ports(1)
        systems["smg, cache_aware"] = [
            *(str(smg), "launch", "--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware"),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port), "--log-level", "warn"),
            *("--worker-urls", *(worker.url for worker in workers)),
        ]
    if vllm_router is not None:
        (metrics_port,) = free_ports(1)
        common = [
            *(str(vllm_router), "--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
            *("--worker-urls", *(worker.url for worker in workers)),
        ]
        events = ["--kv-event-model", MODEL, "--kv-event-block-size", str(BLOCK_SIZE)]
        for worker in workers:
            events += ["--kv-event-source", f"{worker.url}={worker.events}"]
        systems["vllm-router, cache_aware"] = [*common, "--policy", "cache_aware"]
        systems["vllm-router, kv_aware"] = [*common, "--policy", "kv_aware", *events]
    return systems


def main() -> None:
    """Measure every system and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, required=True, help="an environment with vLLM, as `make peers` makes")
    parser.add_argument("--smg", type=Path, help="the smg program")
    parser.add_argument("--vllm-router", type=Path, help="the vllm-router program")
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--asks", type=int, default=4)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--caches", type=int, nargs="+", default=CACHES, help="blocks of each worker's cache")
    parser.add_argument("--out", type=Path, help="a file for the rows, which are printed anyway")
    chosen = parser.parse_args()
    end_with_what_was_started()
    os.environ["SACCADE_VLLM_VENV"] = str(chosen.vllm)
    all_asks = asks(chosen.images, chosen.asks)
    rows: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_qwen3_vl(Path(scratch) / MODEL)
        for num_blocks in chosen.caches:
            (port,) = free_ports(1)
            with two_workers(folder, Path(scratch), num_blocks) as workers:
                facts = needs(warm(workers), all_asks)
                commands = systems(workers, folder, chosen.smg, chosen.vllm_router, port)
                for result in compare(workers, num_blocks, commands, port, folder.parent, all_asks, chosen.clients):
                    print(result, flush=True)
                    rows.append(result)
    print(facts)
    if chosen.out is not None:
        write(chosen.out, "benchmarks.peers", rows, **facts)


@contextlib.contextmanager
def two_workers(folder: Path, scratch: Path, num_blocks: int) -> Iterator[list[VllmServer]]:
    """Start two vLLM workers with caches of *num_blocks* blocks."""
    with contextlib.ExitStack() as stack:
        workers = []
        for name in "ab":
            (own := scratch / f"{name}{num_blocks}").mkdir()
            workers.append(stack.enter_context(vllm(folder, own, num_blocks=num_blocks, name=MODEL)))
        yield workers


def warm(workers: Sequence[VllmServer]) -> Answered:
    """Ask each worker a few times, since the first requests to a vLLM take far longer than others; return an answer."""
    first = [Ask(number, 0, body(number, 0)) for number in range(WARM_SEED, WARM_SEED + NUM_WARM)]
    answered = [one for worker in workers for one in asyncio.run(run(worker.url, first, 1))]
    return answered[0]


def needs(answered: Answered, all_asks: Sequence[Ask]) -> dict[str, Any]:
    """Return the blocks that all images need, and the best possible part of cached tokens.

    A prompt of *answered* has as many tokens as every other; its last, partial block is never cached.
    """
    blocks = answered.prompt_tokens // BLOCK_SIZE
    num_repeats = sum(one.number > 0 for one in all_asks)
    best = num_repeats * blocks * BLOCK_SIZE / (len(all_asks) * answered.prompt_tokens)
    return {"needed blocks": blocks * (len(all_asks) - num_repeats), "best possible cached tokens": round(best, 4)}


def compare(
    workers: Sequence[VllmServer],
    num_blocks: int,
    commands: Mapping[str, Sequence[str]],
    port: int,
    scratch: Path,
    all_asks: Sequence[Ask],
    num_clients: int,
) -> Iterator[dict[str, Any]]:
    """Yield the row of each gateway of *commands*, which listens at *port* and begins with empty caches."""
    for system, command in commands.items():
        with gateway(command, port, scratch / "gateway.log") as url:
            for worker in workers:
                empty(worker)
            time.sleep(SETTLE_SECONDS)
            before = [num_answered(worker) for worker in workers]
            results = asyncio.run(run(url, all_asks, num_clients))
            requests = [num_answered(worker) - number for worker, number in zip(workers, before, strict=True)]
        yield row(system, num_blocks, requests, results)


def num_answered(worker: VllmServer) -> int:
    """Return how many requests a worker has answered, by its own metrics."""
    with urllib.request.urlopen(f"{worker.url}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("vllm:request_success_total"))


def empty(worker: VllmServer) -> None:
    """Empty a worker's caches of blocks, images and encoder outputs."""
    for cache in ("prefix", "mm", "encoder"):
        worker.call(f"/reset_{cache}_cache", method="POST")


if __name__ == "__main__":
    main()

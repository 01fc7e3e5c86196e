"""Saccade and transformers on the bundled model, in turn in one run: TTFT, output tokens per second, start-up.

    python benchmarks/first_light.py [--out benchmarks/results/first-light.json]

Every request has an image of its own, drawn fresh, and generates 64 tokens (end of sequence ignored on both sides).
Saccade is measured through HTTP with streaming, at 1 and at 8 clients, on a server that this program starts and stops;
transformers' generate runs one request at a time in this process, its processor included, with the same threads.
"""

import argparse
import base64
import concurrent.futures
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts" / "train_demo")]

import numpy as np  # noqa: E402
import openai  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402
from reference import Reference  # noqa: E402
from server import Server, serving  # noqa: E402

from saccade.cli.bundled import bundled  # noqa: E402

OUTPUT_TOKENS = 64
REQUESTS = 32
QUESTION = "What does it say?"


@dataclass(frozen=True)
class Row:
    """One measured configuration. Times in ms; tokens per second over the whole run."""

    name: str
    clients: int
    ttft_p50_ms: float
    ttft_p95_ms: float
    tpot_mean_ms: float
    output_tokens_per_second: float


def images(count: int, seed: int) -> list[Image.Image]:
    """Distinct images of the size that the bundled model was trained on."""
    noise = np.random.default_rng(seed)
    return [Image.fromarray(noise.integers(0, 256, (64, 128, 3), dtype=np.uint8)) for _ in range(count)]


def summary(name: str, clients: int, timings: list[tuple[float, float]], wall_seconds: float) -> Row:
    """Reduce (ttft, total) seconds per request to a row."""
    firsts = sorted(first for first, _ in timings)
    per_token = [(total - first) / (OUTPUT_TOKENS - 1) for first, total in timings]
    return Row(
        name,
        clients,
        round(1000 * statistics.median(firsts), 2),
        round(1000 * firsts[int(0.95 * (len(firsts) - 1))], 2),
        round(1000 * statistics.mean(per_token), 3),
        round(len(timings) * OUTPUT_TOKENS / wall_seconds, 1),
    )


def ask(client: openai.OpenAI, model: str, image: Image.Image) -> tuple[float, float]:
    """Stream one answer; return seconds to the first and to the last token."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    content: list[Any] = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
    start = time.perf_counter()
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": content}],
        max_tokens=OUTPUT_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    first = 0.0
    for chunk in stream:
        if chunk.choices and not first and chunk.choices[0].delta.content:
            first = time.perf_counter() - start
        if chunk.usage and chunk.usage.completion_tokens != OUTPUT_TOKENS:
            raise RuntimeError(f"{chunk.usage.completion_tokens} tokens instead of {OUTPUT_TOKENS}")
    total = time.perf_counter() - start
    return first or total, total


def measure_saccade(server: Server, clients: int, seed: int) -> Row:
    """Measure *clients* concurrent streams."""
    client, model = server.client(), server.model
    work = images(REQUESTS, seed)
    with concurrent.futures.ThreadPoolExecutor(clients) as threads:
        start = time.perf_counter()
        timings = list(threads.map(lambda image: ask(client, model, image), work))
        return summary("saccade", clients, timings, time.perf_counter() - start)


def measure_transformers(reference: Reference, seed: int) -> Row:
    """Measure generate: once for one token (TTFT), once for all (total)."""
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}]
    timings = []
    wall = 0.0
    for image in images(REQUESTS, seed):
        seconds = []
        for count in (1, OUTPUT_TOKENS):
            start = time.perf_counter()
            reference.generate(messages, [image], count)
            seconds.append(time.perf_counter() - start)
        timings.append((seconds[0], seconds[1]))
        wall += seconds[1]
    return summary("transformers generate", 1, timings, wall)


def cpu_name() -> str:
    """The processor's name as the kernel knows it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    """Measure both sides twice, in turn, and write the rows with machine, commit and command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/first-light.json")
    arguments = parser.parse_args()
    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    torch.set_num_threads(threads)
    reference = Reference(bundled("model"))
    started = time.perf_counter()
    rows = []
    with serving() as server:
        ready_seconds = round(time.perf_counter() - started, 2)
        measure_saccade(server, 8, 999)
        for repeat in range(2):
            rows += [measure_saccade(server, clients, 10 * repeat + clients) for clients in (1, 8)]
            rows.append(measure_transformers(reference, 50 + repeat))
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout
    report = {
        "machine": f"{cpu_name()}, {os.cpu_count()} cores",
        "commit": commit.strip(),
        "command": "python " + " ".join(["benchmarks/first_light.py", *sys.argv[1:]]),
        "threads": threads,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "note": "transformers gets the image decoded; Saccade gets a PNG in base64",
        "start_to_ready_seconds": ready_seconds,
        "output_tokens": OUTPUT_TOKENS,
        "requests": REQUESTS,
        "rows": [asdict(row) for row in rows],
    }
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()

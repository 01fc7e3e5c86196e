"""`saccade serve` with random weights, measured over HTTP by `saccade bench`: what a client sees."""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.plan import FAILED, PASSED, Row
from benchmarks.gpu.scale import Scale
from benchmarks.measured import free_ports, process
from saccade.engine.config import EngineConfig

SACCADE = [sys.executable, "-c", "from saccade.cli.main import main; main()"]
START_SECONDS = 240.0
LOADS = ((1, 12), (8, 32), (32, 96))
"""Clients, and their requests together."""


def served(config: EngineConfig, scale: Scale, folder: Path) -> Iterator[Row]:
    """Start the server, and measure it under growing loads."""
    (port,) = free_ports(1)
    url, began = f"http://127.0.0.1:{port}", time.perf_counter()
    flags = {
        "--port": str(port), "--device": config.device, "--dtype": config.dtype, "--load-format": config.load_format,
    }  # fmt: skip
    command = [*SACCADE, "serve", config.model_dir, *(word for flag in flags.items() for word in flag)]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "serve.log").open("wb") as log, process(command, log.fileno(), {}) as server:
        _wait_until_ready(url, server)
        yield Row("saccade serve", f"ready after {time.perf_counter() - began:.1f} s")
        width, height = scale.photo_size
        for clients, requests in LOADS if config.device == "cuda" else ((1, 2),):
            results = folder / f"bench-{clients}.json"
            words = [
                "bench", url, "--concurrency", str(clients), "--num-requests", str(requests), "--image-size",
                f"{width}x{height}", "--output-tokens", str(scale.answer * 4), "--json", str(results),
            ]  # fmt: skip
            run = subprocess.run([*SACCADE, *words], capture_output=True, text=True, timeout=START_SECONDS, check=False)
            if run.returncode:
                raise RuntimeError(f"saccade bench ended with {run.returncode}: {run.stderr[-200:]}")
            yield from _rows(clients, json.loads(results.read_text()))
    yield Row("saccade serve ends when it is told to", PASSED)


def _wait_until_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"saccade serve ended with {server.returncode}; serve.log says why")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError(f"saccade serve was not ready after {START_SECONDS:.0f} s")


def _rows(clients: int, results: Mapping[str, Any]) -> Iterator[Row]:
    figures = results["tables"][0]["columns"][0]["figures"]
    label = f"{clients} clients with an image each"
    yield Row(f"{label}: failed requests", PASSED if figures["num_failed"] == 0 else FAILED, f"{figures['num_failed']}")
    stages = ", ".join(
        f"{name} {figures[f'saccade_engine_stage_seconds {name}']:.1f}" for name in ("queue", "encode", "prefill")
    )
    detail = f"90 of 100 within {figures['ttft_p90']:.0f} ms; in the engine, ms: {stages}"
    yield Row(f"{label}: time to first token", f"{figures['ttft_p50']:.1f} ms", detail)
    yield Row(
        f"{label}: time per output token",
        f"{figures['tpot_p50']:.2f} ms",
        f"{figures['tokens_per_second']:.0f} tokens/s",
    )

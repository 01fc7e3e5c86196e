"""Measuring one case on a gateway that runs."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gateway.cases import NUM_IMAGES, Case
from benchmarks.gateway.load import Load
from benchmarks.gateway.photos import write_photos
from benchmarks.gateway.systems import SMG, Running
from benchmarks.measured import MODEL, ROOT

SAMPLE_SECONDS = 0.1
BESIDE_SECONDS = 10.0
LAG = "saccade_event_loop_lag_seconds_bucket"
SHARED_MEMORY = "/dev/shm"


def measure(case: Case, system: str, running: Running, work: Path, scale: float) -> dict[str, Any]:
    """Run *case*, *scale* times as long as it is written, and return its figures."""
    load = _load(case, running, work, scale)
    if case.beside:
        return _beside(load, system, running, scale)
    if case.memory:
        with _peaks(running) as peaks:
            figures(load)
        return {name: round(peak, 1) for name, peak in peaks.items()}
    return figures(load)


def _load(case: Case, running: Running, work: Path, scale: float) -> Load:
    images: Sequence[Path] = ()
    if case.size is not None:
        images = write_photos(work / "{}x{}".format(*case.size), NUM_IMAGES, *case.size)
    # A cache must have seen every image before it is measured.
    num_warmup = max(case.num_clients, len(images) if case.caches else 8)
    return Load(
        url=running.url,
        model=MODEL,
        num_clients=case.num_clients,
        num_requests=max(case.num_clients, round(scale * case.num_requests)),
        num_warmup=num_warmup,
        images=[str(path) for path in images],
        gateway_pid=running.gateway.pid,
        worker_pid=running.worker.pid,
        stream_tokens=case.stream_tokens,
    )


def figures(load: Load) -> dict[str, Any]:
    """Run *load* and return its figures."""
    with _started(load) as process:
        return _figures(process)


@contextlib.contextmanager
def _started(load: Load) -> Iterator[subprocess.Popen[str]]:
    """Start the load; it is warm when the block begins."""
    command = [sys.executable, "-m", "benchmarks.gateway.load", json.dumps(asdict(load))]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, cwd=ROOT, text=True) as process:
        assert process.stderr is not None
        warm_line = process.stderr.readline()
        if warm_line != "warm\n":
            raise RuntimeError(f"the load did not start: {warm_line}{process.stderr.read()}")
        yield process


def _figures(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, errors = process.communicate()
    if process.returncode:
        raise RuntimeError(f"the load failed: {errors}")
    row: dict[str, Any] = json.loads(output)
    return row


@contextlib.contextmanager
def _peaks(running: Running) -> Iterator[dict[str, float]]:
    """Yield the highest values seen while the block runs: the gateway tree's PSS, and what /dev/shm holds."""
    peaks = {"idle_pss_mib": running.pss_mib(), "peak_pss_mib": 0.0, "peak_shm_mib": 0.0}
    before = _shm_mib()
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(SAMPLE_SECONDS):
            peaks["peak_pss_mib"] = max(peaks["peak_pss_mib"], running.pss_mib())
            peaks["peak_shm_mib"] = max(peaks["peak_shm_mib"], _shm_mib() - before)

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield peaks
    finally:
        ended.set()
        sampler.join()


def _shm_mib() -> float:
    filesystem = os.statvfs(SHARED_MEMORY)
    return (filesystem.f_blocks - filesystem.f_bfree) * filesystem.f_frsize / (1 << 20)


def _beside(load: Load, system: str, running: Running, scale: float) -> dict[str, Any]:
    """Measure text requests, and our event loop's lag, while images keep the gateway busy."""
    seconds = max(2.0, scale * BESIDE_SECONDS)
    images = {**asdict(load), "seconds": 1.5 * seconds + 2}
    text = {**asdict(load), "images": (), "num_clients": 1, "num_warmup": 2, "seconds": seconds}
    with _started(Load(**images)) as process:
        before = {} if system == SMG else _lag_buckets(running.metrics())
        beside = figures(Load(**text))
        after = {} if system == SMG else _lag_buckets(running.metrics())
        row = _figures(process)
    row |= {f"text_{name}": beside[name] for name in ("requests", "errors", "receipt_p50_ms", "receipt_p99_ms")}
    if after:
        row["loop_lag_p99_ms"] = _quantile_ms({edge: after[edge] - before[edge] for edge in after}, 0.99)
    return row


def _lag_buckets(metrics: str) -> dict[float, float]:
    """Return how many samples lie at or under each edge, in seconds."""
    lines = [line for line in metrics.splitlines() if line.startswith(LAG)]
    return {float(line.split('le="')[1].split('"')[0]): float(line.rsplit(" ", 1)[1]) for line in lines}


def _quantile_ms(buckets: dict[float, float], quantile: float) -> float | None:
    """Return the quantile by linear interpolation in its bucket, as Prometheus' histogram_quantile does."""
    edges = sorted(buckets)
    rank = quantile * buckets[edges[-1]]
    lower, below = 0.0, 0.0
    for edge in edges:
        if buckets[edge] >= rank > below:
            upper = edge if edge != float("inf") else lower
            return round(1000 * (lower + (upper - lower) * (rank - below) / (buckets[edge] - below)), 2)
        lower, below = edge, buckets[edge]
    return None

"""Measuring the cases on one system."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.engine.cases import TRANSFORMERS, Case
from benchmarks.engine.load import Load
from benchmarks.engine.systems import Running, Setup, running
from benchmarks.measured import MODEL, ROOT

SAMPLE_SECONDS = 0.25
NUMBERS_PER_ROW = 1000


@dataclass
class Numbers:
    """Hands every row numbers of its own, so that its images are new to every cache."""

    taken: int = 0

    def take(self) -> int:
        """Return the first number of the next row."""
        self.taken += NUMBERS_PER_ROW
        return self.taken


@dataclass
class Peak:
    """The most memory seen, in MiB."""

    mib: float = field(default=0.0)

    def look(self, server: Running) -> None:
        """Look once."""
        self.mib = max(self.mib, server.pss_mib())


def measure(
    system: str, setup: Setup, cases: Sequence[Case], scale: float, numbers: Numbers
) -> Iterator[dict[str, Any]]:
    """Yield the figures of each case, *scale* times as many requests as it is written with."""
    if system == TRANSFORMERS:
        for case in cases:
            if case.num_clients == 1:
                yield {"case": case.name, "clients": 1, **_in_process(case, setup, scale, numbers.take())}
        return
    with running(system, setup) as server:
        for case in cases:
            load = _load(case, server, scale, numbers.take())
            figures = {"case": case.name, "clients": case.num_clients, **_run(load, server)}
            yield {**figures, "start_seconds": server.start_seconds}


def _num_requests(case: Case, scale: float) -> int:
    return max(2, case.num_clients, round(scale * case.num_requests))


def _load(case: Case, server: Running, scale: float, first_number: int) -> Load:
    return Load(
        url=server.url,
        model=MODEL,
        num_clients=case.num_clients,
        num_requests=_num_requests(case, scale),
        num_warmup=max(case.num_warmup, case.num_clients),
        first_number=first_number,
        output_tokens=case.output_tokens,
        size=case.size,
        same=case.same,
        server_pid=server.pid,
    )


def _run(load: Load, server: Running) -> dict[str, Any]:
    """Run *load* in a process of its own. Memory is sampled while it warms up and behind it, not while it runs."""
    command = [sys.executable, "-m", "benchmarks.engine.load", json.dumps(asdict(load))]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, cwd=ROOT, text=True) as process:
        assert process.stderr is not None
        with _sampled(server) as peak:
            line = process.stderr.readline()
        output, errors = process.communicate()
    if process.returncode or line != "warm\n":
        raise RuntimeError(f"the load failed: {line}{errors}")
    peak.look(server)
    figures: dict[str, Any] = json.loads(output)
    return {**figures, "peak_pss_mib": round(peak.mib, 1)}


@contextmanager
def _sampled(server: Running) -> Iterator[Peak]:
    """Sample the server's memory until the block ends."""
    peak, ended = Peak(), threading.Event()

    def sample() -> None:
        while not ended.wait(SAMPLE_SECONDS):
            peak.look(server)

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield peak
    finally:
        ended.set()
        sampler.join()


def _in_process(case: Case, setup: Setup, scale: float, first_number: int) -> dict[str, Any]:
    settings = {
        "model": str(setup.model),
        "threads": setup.threads,
        "num_requests": _num_requests(case, scale),
        "first_number": first_number,
        "output_tokens": case.output_tokens,
        "size": case.size,
        "same": case.same,
    }
    command = [sys.executable, "-m", "benchmarks.engine.transformers_generate", json.dumps(settings)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(setup.threads), "HF_HUB_OFFLINE": "1"}
    with (setup.logs / "transformers.log").open("ab") as log:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, cwd=ROOT, env=environment, check=True)
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures

"""Start of an engine with and without its kernels' code at hand: `OMP_NUM_THREADS=1 python -m benchmarks.start`."""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measured import commit, machine
from saccade.cli.bundled import bundled

PROGRAM = """
import resource, sys
from saccade.engine.config import EngineConfig
from saccade.engine.startup import start
model, dtype, backend = sys.argv[1:]
start(EngineConfig(model, "model", device="cpu", dtype=dtype, attention_backend=backend), lambda *_: None)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
DTYPES = ("float32", "bfloat16")
NUM_ROUNDS = 5


def started(dtype: str, backend: str, cache: Path) -> tuple[float, float]:
    """Return the seconds from nothing to an engine that is ready, and the MiB that it had at most."""
    command = [sys.executable, "-c", PROGRAM, str(bundled("model")), dtype, backend]
    began = time.perf_counter()
    ended = subprocess.run(
        command, env={**os.environ, "XDG_CACHE_HOME": str(cache)}, stdout=subprocess.PIPE, check=True
    )
    return time.perf_counter() - began, int(ended.stdout) / 1024


def main() -> None:
    """Print a table: medians, and the start that finds code over the one that does not."""
    print(f"{machine()}; commit {commit()}\n\n| dtype | start | seconds | MiB at most |\n|---|---|---|---|")
    for dtype in DTYPES:
        rows: dict[str, list[tuple[float, float]]] = {}
        with tempfile.TemporaryDirectory() as kept:
            started(dtype, "auto", Path(kept))
            for _ in range(NUM_ROUNDS):
                with tempfile.TemporaryDirectory() as empty:
                    rows.setdefault("first, kernels compiled", []).append(started(dtype, "auto", Path(empty)))
                rows.setdefault("later, kernels found", []).append(started(dtype, "auto", Path(kept)))
                rows.setdefault("without kernels (torch_sdpa)", []).append(started(dtype, "torch_sdpa", Path(kept)))
        medians = {
            row: [statistics.median(values) for values in zip(*times, strict=True)] for row, times in rows.items()
        }
        for row, (seconds, mib) in medians.items():
            print(f"| {dtype} | {row} | {seconds:.1f} | {mib:.0f} |")
        first, later, _ = (seconds for seconds, _ in medians.values())
        print(f"| {dtype} | later over first | {later / first:.2f}x | |")


if __name__ == "__main__":
    main()

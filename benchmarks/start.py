"""Start of an engine with and without its kernel's code at hand: `OMP_NUM_THREADS=1 python -m benchmarks.start`."""

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
model, backend = sys.argv[1:]
start(EngineConfig(model, "model", device="cpu", mm_encoder_attn_backend=backend), lambda *_: None)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
NUM_ROUNDS = 5


def started(backend: str, cache: Path) -> tuple[float, float]:
    """Return the seconds from nothing to an engine that is ready, and the MiB that it had at most."""
    command = [sys.executable, "-c", PROGRAM, str(bundled("model")), backend]
    began = time.perf_counter()
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return time.perf_counter() - began, int(ended.stdout) / 1024


def main() -> None:
    """Print a table: medians, and the start that finds code over the one that does not."""
    print(f"{machine()}; commit {commit()}\n\n| start | seconds | MiB at most |\n|---|---|---|")
    rows: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as kept:
        started("auto", Path(kept))
        for _ in range(NUM_ROUNDS):
            with tempfile.TemporaryDirectory() as empty:
                rows.setdefault("first, the kernel compiled", []).append(started("auto", Path(empty)))
            rows.setdefault("later, the kernel found", []).append(started("auto", Path(kept)))
            rows.setdefault("without the kernel (torch_sdpa)", []).append(started("torch_sdpa", Path(kept)))
    medians = {row: [statistics.median(values) for values in zip(*times, strict=True)] for row, times in rows.items()}
    for row, (seconds, mib) in medians.items():
        print(f"| {row} | {seconds:.1f} | {mib:.0f} |")
    first, later, _ = (seconds for seconds, _ in medians.values())
    print(f"| later over first | {later / first:.2f}x | |")


if __name__ == "__main__":
    main()

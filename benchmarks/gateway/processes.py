"""CPU of a request with one and with two gateway processes: `python -m benchmarks.gateway.processes`.

Two workers of one model without engines, text requests, the load of `benchmarks.gateway` at a fixed rate, which leaves
processors idle: on a full machine everything takes more CPU, and two processes fill it sooner. Runs take turns.
"""

import argparse
import contextlib
import json
import statistics
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.gateway.cases import QWEN
from benchmarks.gateway.load import Load
from benchmarks.gateway.model_folder import write_model
from benchmarks.gateway.rows import figures
from benchmarks.measured import MODEL, answers, commit, end_with_what_was_started, free_ports, machine, process

READY_SECONDS = 60.0
LIMIT = 1.1
COUNTS = (1, 2)


def measure(count: int, folder: Path, log: Path, num_requests: int, per_second: float) -> dict[str, Any]:
    """Return the figures of *num_requests*, *per_second* of them, at a gateway of *count* processes."""
    port, *worker_ports = free_ports(3)
    with contextlib.ExitStack() as running:
        file = running.enter_context(log.open("ab"))
        for worker_port in worker_ports:
            words = ["-m", "benchmarks.gateway.native_worker", str(folder), "--model", MODEL]
            running.enter_context(process([sys.executable, *words, "--port", str(worker_port)], file.fileno(), {}))
        command = [sys.executable, "-m", "saccade.cli.main", "gateway", "--log-level", "WARNING", "--port", str(port)]
        command += [word for one in worker_ports for word in ("--worker-url", f"grpc://127.0.0.1:{one}")]
        started = running.enter_context(process([*command, "--gateway-processes", str(count)], file.fileno(), {}))
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + READY_SECONDS
        while not (answers(url) and all_serve(url, count)):
            if started.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the gateway did not become ready; {log} tells more")
            time.sleep(0.1)
        load = Load(url, MODEL, 32, num_requests, 500, gateway_pid=started.pid, per_second=per_second)
        return figures(load)


def all_serve(url: str, count: int) -> bool:
    """Whether all *count* processes have answered, so that none of them is still starting."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        page = response.read().decode()
    lines = [line for line in page.splitlines() if line.startswith("saccade_http_requests_total")]
    return count == 1 or all(any(f'gateway_process="{one}"' in line for line in lines) for one in range(count))


def main() -> None:
    """Measure in turns, and print the figures and the ratio as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("/tmp/saccade-benchmark-processes"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--per-second", type=float, default=250.0, help="0: as many as 32 clients can send")
    options = parser.parse_args()
    end_with_what_was_started()
    options.work.mkdir(parents=True, exist_ok=True)
    folder = write_model(options.work / QWEN, QWEN)
    rows: list[dict[str, Any]] = []
    for repeat in range(options.repeats):
        for count in COUNTS if repeat % 2 == 0 else reversed(COUNTS):
            rows.append(
                {
                    "processes": count,
                    **measure(count, folder, options.work / "log", options.requests, options.per_second),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    one, two = (statistics.median(row["gateway_cpu_ms"] for row in rows if row["processes"] == n) for n in COUNTS)
    print(json.dumps({"machine": machine(), "commit": commit(), "one_ms": one, "two_ms": two, "ratio": two / one}))
    if two / one > LIMIT:
        sys.exit(f"With two processes a request takes more than {LIMIT} times the CPU.")


if __name__ == "__main__":
    main()

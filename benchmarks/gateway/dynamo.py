"""CPU of a text request beside Dynamo's front end: `python -m benchmarks.gateway.dynamo --python DYNAMO_PYTHON`.

Dynamo is not installed by Saccade: make a virtual environment and `pip install ai-dynamo-runtime==1.6.1 aiohttp msgspec
pyzmq prometheus-client tqdm zstandard certifi transformers && pip install --no-deps ai-dynamo==1.6.1`. Both sides route
by KV to two workers without engines: Dynamo's to its own mocker, ours to `benchmarks.gateway.native_worker`. A mocker
sends every token by itself; our worker sends such an answer in one delta.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gateway.cases import QWEN
from benchmarks.gateway.load import Load
from benchmarks.gateway.model_folder import write_model
from benchmarks.gateway.receipt import RECEIPT_TOKENS
from benchmarks.gateway.rows import figures
from benchmarks.gateway.systems import wait
from benchmarks.measured import MODEL, answers, commit, end_with_what_was_started, free_ports, machine, process

NUM_WORKERS = 2
Process = subprocess.Popen[bytes]
DYNAMO, SACCADE = "dynamo", "saccade"
NUM_TOKENS = 24
LIMIT = 1.5


@contextlib.contextmanager
def dynamo(python: Path, folder: Path, log: int, work: Path) -> Iterator[tuple[str, Process]]:
    """Yield the URL and the process of Dynamo's front end before two mocked engines."""
    port = free_ports(1)[0]
    environment = {"DYN_FILE_KV": str(work / "dynamo-kv"), "HF_HUB_OFFLINE": "1"}
    environment |= {"DYN_TCP_RPC_HOST": "127.0.0.1", "DYN_EVENT_PLANE_HOST": "127.0.0.1"}
    planes = ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
    mocker = [python, "-m", "dynamo.mocker", "--model-path", folder, "--model-name", MODEL, *planes]
    mocker += ["--num-workers", str(NUM_WORKERS), "--block-size", "16", "--speedup-ratio", "1000"]
    front = [python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port), *planes]
    front += ["--router-mode", "kv", "--kv-cache-block-size", "16"]
    with (
        process([str(word) for word in mocker], log, environment),
        process([str(word) for word in front], log, environment) as started,
    ):
        yield f"http://127.0.0.1:{port}", started


@contextlib.contextmanager
def saccade(folder: Path, log: int) -> Iterator[tuple[str, Process]]:
    """Yield the URL and the process of our gateway before two workers without engines."""
    port, *worker_ports = free_ports(1 + NUM_WORKERS)
    with contextlib.ExitStack() as running:
        for worker_port in worker_ports:
            words = ["-m", "benchmarks.gateway.native_worker", str(folder), "--model", MODEL]
            running.enter_context(process([sys.executable, *words, "--port", str(worker_port)], log, {}))
        command = [sys.executable, "-m", "saccade.cli.main", "gateway", "--log-level", "WARNING", "--port", str(port)]
        command += [word for one in worker_ports for word in ("--worker-url", f"grpc://127.0.0.1:{one}")]
        started = running.enter_context(process(command, log, {}))
        yield f"http://127.0.0.1:{port}", started


def measure(system: str, python: Path, folder: Path, work: Path, num_requests: int) -> dict[str, Any]:
    """Return the figures of *num_requests* answers of NUM_TOKENS tokens."""
    with (work / "log").open("ab") as log:
        is_ours = system == SACCADE
        running = saccade(folder, log.fileno()) if is_ours else dynamo(python, folder, log.fileno(), work)
        with running as (url, started):
            wait(started, lambda: answers(url))
            # Our worker's receipt has about as many tokens.
            max_tokens = RECEIPT_TOKENS if is_ours else NUM_TOKENS
            load = Load(
                url, MODEL, 32, num_requests, 200, gateway_pid=started.pid, max_tokens=max_tokens, receipts=is_ours
            )
            return {"system": system, **figures(load)}


def main() -> None:
    """Measure in turns, and print every row and the ratios as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="Python of the environment that has Dynamo")
    parser.add_argument("--work", type=Path, default=Path("/tmp/saccade-benchmark-dynamo"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=4000)
    options = parser.parse_args()
    end_with_what_was_started()
    options.work.mkdir(parents=True, exist_ok=True)
    folder = write_model(options.work / QWEN, QWEN)
    measured: list[dict[str, Any]] = []
    for repeat in range(options.repeats):
        for system in (DYNAMO, SACCADE) if repeat % 2 == 0 else (SACCADE, DYNAMO):
            measured.append(measure(system, options.python, folder, options.work, options.requests))
            print(json.dumps(measured[-1]), flush=True)
    theirs, ours = (
        statistics.mean(row["gateway_cpu_ms"] for row in measured if row["system"] == system)
        for system in (DYNAMO, SACCADE)
    )
    ratios = {"dynamo_ms": theirs, "saccade_ms": ours, "ratio": ours / theirs, "goal": LIMIT}
    print(json.dumps({"machine": machine(), "commit": commit(), **ratios}))


if __name__ == "__main__":
    main()

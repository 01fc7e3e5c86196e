"""Time to the first token of four arrangements of servers: Saccade, vLLM, Saccade before vLLM, SMG before our worker.

    python -m benchmarks.report.ttft --system Saccade [--clients 1 10 30 50 100] [--requests 200] [--out FILE]
    python -m benchmarks.report.ttft --system vLLM --vllm VENV
    python -m benchmarks.report.ttft --system "SMG before our worker" --smg SMG [--turbojpeg FOLDER]

Every request shows an image that no other request shows, a PNG of 448 x 448, and asks for 16 tokens. Clients are in a
closed loop. All systems serve the same tiny checkpoint in float32 on one thread, 8 sequences at a time.
"""

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.gateway.load import percentile
from benchmarks.measured import end_with_what_was_started, free_ports, process, pss_mib, write
from benchmarks.peers.__main__ import MODEL, Answered, Ask, ask, body, gateway, vllm, write_qwen3_vl

NUM_TOKENS = 16
SACCADE = str(Path(sys.executable).with_name("saccade"))
WARM_SEED, FIRST_SEED = 10_000, 20_000
NUM_WARM = 8


@dataclass(frozen=True)
class Setup:
    """The checkpoint, a folder for logs and sockets, SMG's program and the folder of its libturbojpeg."""

    folder: Path
    scratch: Path
    smg: Path | None
    turbojpeg: Path | None


async def run(url: str, seeds: Sequence[int], num_clients: int) -> tuple[list[Answered], float]:
    """Ask about the images of *seeds*, *num_clients* at a time; return the answers and the seconds it took."""
    bodies = [Ask(seed, 0, body(seed, 0, NUM_TOKENS)) for seed in seeds]
    waiting, results = iter(bodies), []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), read_bufsize=1 << 20) as session:

        async def client() -> None:
            for each in waiting:
                results.append(await ask(session, url, each))

        begun = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(num_clients)))
        return results, time.perf_counter() - begun


def measure(system: str, url: str, clients: Sequence[int], num_requests: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of clients."""
    asyncio.run(run(url, range(WARM_SEED, WARM_SEED + NUM_WARM), 2))
    for number, num_clients in enumerate(clients):
        first = FIRST_SEED + number * num_requests
        results, seconds = asyncio.run(run(url, range(first, first + num_requests), num_clients))
        ttft_ms = [1000 * one.ttft_s for one in results]
        yield {
            "system": system,
            "clients": num_clients,
            "requests": len(results),
            "ttft_p50_ms": percentile(ttft_ms, 50),
            "ttft_p99_ms": percentile(ttft_ms, 99),
            "tokens_per_second": round(NUM_TOKENS * len(results) / seconds, 1),
            # All that this program has started.
            "pss_mib": round(sum(pss_mib(child.pid) for child in psutil.Process().children()), 1),
        }


@contextlib.contextmanager
def worker(setup: Setup, *flags: str) -> Iterator[str]:
    """Run our worker, and yield its URL."""
    socket = setup.scratch / "worker.sock"
    command = [SACCADE, "worker", str(setup.folder), "--uds", str(socket), "--served-model-name", MODEL]
    command += ["--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "8", *flags]
    with (setup.scratch / "worker.log").open("ab") as log, process(command, log.fileno(), {"OMP_NUM_THREADS": "1"}):
        yield f"unix:{socket}"


@contextlib.contextmanager
def ours(setup: Setup, worker_url: str, *flags: str) -> Iterator[str]:
    """Run our gateway before a worker."""
    (port,) = free_ports(1)
    command = [SACCADE, "gateway", "--log-level", "WARNING", "--port", str(port), "--worker-url", worker_url, *flags]
    with gateway(command, port, setup.scratch / "gateway.log") as url:
        yield url


@contextlib.contextmanager
def saccade(setup: Setup) -> Iterator[str]:
    """Run our gateway and worker."""
    with worker(setup) as worker_url, ours(setup, worker_url) as url:
        yield url


@contextlib.contextmanager
def vllm_alone(setup: Setup) -> Iterator[str]:
    """Run vLLM."""
    with vllm(setup.folder, setup.scratch, name=MODEL) as server:
        yield server.url


@contextlib.contextmanager
def before_vllm(setup: Setup) -> Iterator[str]:
    """Run our gateway before vLLM."""
    with (
        vllm(setup.folder, setup.scratch, name=MODEL) as server,
        ours(setup, f"vllm://127.0.0.1:{server.port}", "--model", f"{MODEL}={setup.folder}") as url,
    ):
        yield url


@contextlib.contextmanager
def smg(setup: Setup) -> Iterator[str]:
    """Run SMG before our worker, over TokenSpeed's wire."""
    worker_port, port, metrics_port = free_ports(3)
    command = [str(setup.smg), "launch", "--backend", "tokenspeed", "--worker-urls", f"grpc://127.0.0.1:{worker_port}"]
    command += [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--log-level",
        "warn",
        "--worker-startup-check-interval",
        "1",
    ]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    command += ["--multimodal-tensor-transport", "auto"]
    environment = {"LD_LIBRARY_PATH": str(setup.turbojpeg)} if setup.turbojpeg else {}
    with (
        worker(setup, "--serve-tokenspeed", f"127.0.0.1:{worker_port}", "--kv-events-token-ids"),
        gateway(command, port, setup.scratch / "smg.log", environment) as url,
    ):
        yield url


SYSTEMS: dict[str, Callable[[Setup], contextlib.AbstractContextManager[str]]] = {
    "Saccade": saccade,
    "Saccade before vLLM": before_vllm,
    "vLLM": vllm_alone,
    "SMG before our worker": smg,
}


def main() -> None:
    """Measure a system and write its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", choices=SYSTEMS, required=True)
    parser.add_argument("--vllm", type=Path, help="an environment with vLLM, as `make peers` makes")
    parser.add_argument("--smg", type=Path, help="the smg program")
    parser.add_argument("--turbojpeg", type=Path, help="the folder of libturbojpeg.so.0, for SMG")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 10, 30, 50, 100])
    parser.add_argument("--requests", type=int, default=200, help="of a row")
    parser.add_argument("--out", type=Path, help="a file for the rows, which are printed anyway")
    chosen = parser.parse_args()
    end_with_what_was_started()
    if chosen.vllm is not None:
        os.environ["SACCADE_VLLM_VENV"] = str(chosen.vllm)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        setup = Setup(write_qwen3_vl(scratch / MODEL), scratch, chosen.smg, chosen.turbojpeg)
        with SYSTEMS[chosen.system](setup) as url:
            for row in measure(chosen.system, url, chosen.clients, chosen.requests):
                rows.append(row)
                print(row, flush=True)
    if chosen.out is not None:
        write(chosen.out, "benchmarks.report.ttft", rows)


if __name__ == "__main__":
    main()

"""Time to the first token beside an engine that preprocesses by itself: Saccade, vLLM, and Saccade in front of vLLM.

python -m benchmarks.peers.ttft --vllm VENV [--clients 1 10 30] [--requests 2] [--out FILE]

Every request shows an image that no other request of its system shows, and asks for 16 tokens. All systems serve the
same tiny checkpoint in float32 on one thread.
"""

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.gateway.load import percentile
from benchmarks.measured import commit, end_with_what_was_started, free_ports, machine, process
from benchmarks.peers.__main__ import (
    MODEL,
    SIDE,
    Answered,
    Ask,
    VllmServer,
    ask,
    body,
    empty,
    gateway,
    vllm,
    write_qwen3_vl,
)

NUM_TOKENS = 16
MIN_REQUESTS = 20
SACCADE = str(Path(sys.executable).with_name("saccade"))
FIRST_SEED = 20_000
"""The images of the warming requests have other seeds than these."""


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


def measure(system: str, url: str, chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each number of clients."""
    asyncio.run(run(url, range(10_000, 10_000 + 4), 2))
    rows, seed = [], FIRST_SEED
    for num_clients in chosen.clients:
        count = max(MIN_REQUESTS, chosen.requests * num_clients)
        results, seconds = asyncio.run(run(url, range(seed, seed + count), num_clients))
        seed += count
        ttft_ms = [1000 * one.ttft_s for one in results]
        rows.append(
            {
                "system": system,
                "clients": num_clients,
                "requests": len(results),
                "TTFT p50 ms": percentile(ttft_ms, 50),
                "TTFT p99 ms": percentile(ttft_ms, 99),
                "tok/s": round(NUM_TOKENS * len(results) / seconds, 1),
            }
        )
        print(rows[-1], flush=True)
    return rows


@contextlib.contextmanager
def ours(folder: Path, scratch: Path) -> Iterator[str]:
    """Run Saccade's gateway and worker."""
    (port,) = free_ports(1)
    socket = scratch / "w.sock"
    flags = ["--served-model-name", MODEL, "--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "8"]
    with (scratch / "worker.log").open("ab") as log:
        command = [SACCADE, "worker", str(folder), "--uds", str(socket), *flags]
        with process(command, log.fileno(), {"OMP_NUM_THREADS": "1"}), over(f"unix:{socket}", (), port, scratch) as url:
            yield url


@contextlib.contextmanager
def over(worker_url: str, more: Sequence[str], port: int, scratch: Path) -> Iterator[str]:
    """Run our gateway in front of a worker."""
    command = [SACCADE, "gateway", "--log-level", "WARNING", "--port", str(port), "--worker-url", worker_url, *more]
    with gateway(command, port, scratch / "gateway.log") as url:
        yield url


def main() -> None:
    """Measure the three and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, required=True, help="an environment with vLLM, as `make peers` makes")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 10, 30])
    parser.add_argument("--requests", type=int, default=2, help="of each client")
    parser.add_argument("--out", type=Path, help="a file that the table is added to; it is printed anyway")
    chosen = parser.parse_args()
    end_with_what_was_started()
    os.environ["SACCADE_VLLM_VENV"] = str(chosen.vllm)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        folder = write_qwen3_vl(scratch / MODEL)
        with ours(folder, scratch) as url:
            rows += measure("saccade gateway and worker", url, chosen)
        with vllm(folder, scratch, name=MODEL) as worker:
            rows += beside(worker, folder, scratch, chosen)
    table = markdown(rows)
    print(table)
    if chosen.out is not None:
        with chosen.out.open("a") as file:
            file.write(table)


def beside(worker: VllmServer, folder: Path, scratch: Path, chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure vLLM by itself, then the same vLLM behind our gateway; its caches are emptied between."""
    rows = measure("vLLM by itself", worker.url, chosen)
    empty(worker)
    (port,) = free_ports(1)
    with over(f"vllm://127.0.0.1:{worker.port}", ("--model", f"{MODEL}={folder}"), port, scratch) as url:
        return [*rows, *measure("saccade gateway, vLLM", url, chosen)]


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a section of the page of results."""
    lines = ["", "# Time to the first token", "", f"Machine: {machine()}  ", f"Commit: {commit()}  "]
    lines += [f"Command: python -m benchmarks.peers.ttft {' '.join(sys.argv[1:])}  ", ""]
    lines += [
        f"A tiny Qwen3-VL in float32, 8 sequences at a time; every request has a PNG of {SIDE} x {SIDE} and asks for",
        f"{NUM_TOKENS} tokens.",
        "",
        "| " + " | ".join(rows[0]) + " |",
        "|---" * len(rows[0]) + "|",
    ]
    return "\n".join([*lines, *("| " + " | ".join(map(str, each.values())) + " |" for each in rows), ""])


if __name__ == "__main__":
    main()

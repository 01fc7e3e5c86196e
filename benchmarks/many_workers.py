"""What a gateway process needs for many workers: `python -m benchmarks.many_workers --workers 1000`.

One child process serves all workers, each at a Unix socket of its own, with empty caches and the same model files. This
process is the gateway's half: the worker pool, the index with every worker's feed, and the router. Seconds are CPU time
of this process; memory is its proportional set size (PSS), minus what it had before.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import msgspec
import uvloop

from benchmarks.measured import MIB, commit, machine
from saccade.fleet.dispatch import Dispatcher
from saccade.fleet.feed import CacheListener
from saccade.fleet.index import BlockIndex
from saccade.fleet.pool import WorkerPool
from saccade.fleet.router import Router
from saccade.identity.content import files_digest
from saccade.protocol.description import NO_FILES, Description, ModelFiles
from saccade.protocol.engine_load import Load
from saccade.protocol.kv_events import KvEvents
from saccade.protocol.output import StepFrame
from saccade.transport.framing import Frames
from saccade.transport.gateway_streams import GatewayStream
from saccade.transport.server import WorkerServer

LOAD_SECONDS = 0.25
"""A worker reports its load as often."""

IDLE_SECONDS = 5.0
POLL_SECONDS = 0.02
TOKENIZER_BYTES = 11 * MIB


class Idle:
    """The front of a worker without requests, which reports its load and an empty cache."""

    def __init__(self, with_files: bytes, without_files: bytes) -> None:
        self._descriptions = {False: with_files, True: without_files}
        self._snapshot = msgspec.msgpack.encode(KvEvents(0, [], snapshot=True))
        self._streams: list[GatewayStream] = []

    def describe(self, *, without_files: bool = False) -> bytes:
        return self._descriptions[without_files]

    def open(self, frames: Frames | None = None) -> GatewayStream:
        self._streams.append(GatewayStream(len(self._streams), frames))
        return self._streams[-1]

    def watch(self, blocks: bool, images: bool) -> GatewayStream:
        watcher = GatewayStream(0)
        watcher.send(self._snapshot)
        return watcher

    def receive(self, connection: GatewayStream, command: bytes) -> None:
        """Ignore *command*: nothing is asked here."""

    def hang_up(self, connection: GatewayStream) -> None:
        """Note nothing: the process ends with the measurement."""

    def report(self, load: bytes) -> None:
        """Send *load* to every gateway."""
        for stream in self._streams:
            stream.send(load)


async def serve(folder: Path, num_workers: int) -> None:
    """Serve *num_workers* at sockets in *folder*, until this process is killed."""
    files = ModelFiles(files={"config.json": b"{}", "tokenizer.json": os.urandom(TOKENIZER_BYTES)})
    description = Description(
        model="m",
        fingerprint=bytes(32),
        files=files,
        max_model_len=1 << 17,
        max_num_seqs=256,
        block_size=16,
        num_blocks=1000,
        dtype="bfloat16",
        device="none",
        shm_namespace="here",
        version="0",
    )
    brief = msgspec.structs.replace(description, files=NO_FILES, files_digest=files_digest(files.files))
    front = Idle(msgspec.msgpack.encode(description), msgspec.msgpack.encode(brief))
    servers = [WorkerServer(front, f"unix:{folder}/{number}.sock") for number in range(num_workers)]
    for server in servers:
        await server.start()
        server.set_ready(True)
    print("ready", flush=True)
    load = msgspec.msgpack.encode(StepFrame([], load=Load(num_blocks=1000, num_free_blocks=1000)))
    while True:
        await asyncio.sleep(LOAD_SECONDS)
        front.report(load)


def memory_bytes() -> int:
    """Return the PSS of this process."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


async def measure(folder: Path, num_workers: int) -> str:
    """Connect to every worker in *folder*, and return a table row."""
    before, start = memory_bytes(), time.process_time()
    pool = WorkerPool([f"unix:{folder}/{number}.sock" for number in range(num_workers)], lambda _: None)
    router = Router("auto", BlockIndex(512 << 20), Random(0))
    listener = CacheListener(pool, router)
    Dispatcher(pool, router)
    await pool.start()
    while not all(worker.state.ready for worker in pool.clients):  # noqa: ASYNC110  nothing signals the last one
        await asyncio.sleep(POLL_SECONDS)
    ready = time.process_time() - start
    while not all(router.index.is_exact(worker.url) for worker in pool.clients):  # noqa: ASYNC110
        await asyncio.sleep(POLL_SECONDS)
    exact = time.process_time() - start
    since, began = time.process_time(), time.perf_counter()
    await asyncio.sleep(IDLE_SECONDS)
    share = (time.process_time() - since) / (time.perf_counter() - began)
    added = memory_bytes() - before
    await listener.close()
    await pool.close()
    return f"| {num_workers} | {ready:.1f} | {exact:.1f} | {100 * share:.1f} % | {added // MIB} | {before // MIB} |"


def run(counts: Sequence[int]) -> None:
    """Measure every count of workers, and print a page."""
    print("# What a gateway process needs for many workers\n")
    print(f"- machine: {machine()}\n- commit: {commit()}\n- command: `python -m benchmarks.many_workers`\n")
    print(
        f"Every worker has the same {TOKENIZER_BYTES // MIB} MiB of files, and reports its load four times a second.\n"
    )
    print("| workers | all ready, CPU s | all EXACT, CPU s | idle, of a core | added MiB | MiB before |")
    print("|---|---|---|---|---|---|", flush=True)
    for count in counts:
        with tempfile.TemporaryDirectory(prefix="saccade-") as folder:
            command = (sys.executable, "-m", "benchmarks.many_workers", "--serve", folder, "--workers", str(count))
            with subprocess.Popen(command, stdout=subprocess.PIPE) as served:
                try:
                    if served.stdout is None or served.stdout.readline() != b"ready\n":
                        raise RuntimeError("The workers did not start.")
                    # Each count gets a process of its own, so that its memory is not that of the one before.
                    print(
                        subprocess.check_output((*command[:3], "--measure", *command[4:]), text=True),
                        end="",
                        flush=True,
                    )
                finally:
                    served.kill()


def main() -> None:
    """Run the part that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[16, 1000])
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        uvloop.run(serve(arguments.serve, arguments.workers[0]))
    elif arguments.measure is not None:
        print(uvloop.run(measure(arguments.measure, arguments.workers[0])))
    else:
        run(arguments.workers)


if __name__ == "__main__":
    main()

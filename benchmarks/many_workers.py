"""What gateway processes and their indexer need for many workers: `python -m benchmarks.many_workers`.

One process serves all workers, each at a Unix socket of its own, with empty caches and the files of the bundled model,
whose tokenizer is padded to 11 MiB. `saccade gateway --gateway-processes 2` runs before it has any worker, then gets
all of them in its workers file. Seconds are CPU time from there on; memory is the proportional set size (PSS).
"""

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil
import uvloop

from benchmarks.measured import MIB, ROOT, commit, end_with_what_was_started, free_ports, machine, process
from saccade.identity.content import files_digest
from saccade.models.files import read_model_files
from saccade.protocol.description import NO_FILES, Description, ModelFiles
from saccade.protocol.engine_load import Load
from saccade.protocol.kv_events import KvEvents
from saccade.protocol.output import StepFrame
from saccade.transport.framing import Frames
from saccade.transport.gateway_streams import GatewayStream
from saccade.transport.server import WorkerServer

LOAD_SECONDS = 0.25
"""A worker reports its load as often."""

NUM_GATEWAYS = 2
IDLE_SECONDS = 10.0
POLL_SECONDS = 0.1
START_SECONDS, LEARN_SECONDS = 600.0, 600.0
TOKENIZER_BYTES = 11 * MIB
MODEL = ROOT / "src/saccade/cli/bundled/model"
IS_EXACT = b" are EXACT: "
"""In the line that the indexer logs when it knows all that a worker holds."""

IS_STARTED = b"gateway listens"


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
    read = read_model_files(MODEL).files
    files = ModelFiles(files={**read, "tokenizer.json": read["tokenizer.json"].ljust(TOKENIZER_BYTES)})
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


class Group:
    """The gateway processes and the indexer below *supervisor*, by role."""

    def __init__(self, supervisor: int) -> None:
        below = psutil.Process(supervisor).children(recursive=True)
        commands = [(one, one.cmdline()) for one in below]
        self._processes = {
            _role(command[command.index("--group-member") + 1]): one
            for one, command in commands
            if "--group-member" in command
        }

    def seconds(self) -> dict[str, float]:
        """Return the CPU time of each so far."""
        return {role: sum(one.cpu_times()[:2]) for role, one in self._processes.items()}

    def pss(self) -> dict[str, int]:
        """Return the PSS of each, in MiB."""
        return {role: one.memory_full_info().pss // MIB for role, one in self._processes.items()}


def _role(member: str) -> str:
    return member if member == "indexer" else f"gateway {member}"


def wait_until(log: Path, line: bytes, count: int, seconds: float) -> None:
    """Wait until *log* has *count* lines with *line*. Raises RuntimeError after *seconds*."""
    end = time.monotonic() + seconds
    while log.read_bytes().count(line) < count:
        if time.monotonic() > end:
            raise RuntimeError(f"{log.read_bytes().count(line)} of {count} lines after {seconds:g} s")
        time.sleep(POLL_SECONDS)


def num_exact(port: int) -> int:
    """Return how many workers are EXACT, added up over the gateway processes."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return sum(line.startswith("saccade_router_exact{") and line.endswith(" 1.0") for line in lines)


def measure(folder: Path, num_workers: int) -> Sequence[str]:
    """Give the workers in *folder* to a gateway, and return a table row for each of its processes."""
    (port,) = free_ports(1)
    listed, log = folder / "workers", folder / "log"
    listed.write_text("# none\n")
    command = (sys.executable, "-m", "saccade.cli.main", "gateway", "--port", str(port), "--gateway-processes")
    with (
        log.open("wb") as written,
        process((*command, str(NUM_GATEWAYS), "--workers-file", str(listed)), written.fileno(), {}) as started,
    ):
        wait_until(log, IS_STARTED, NUM_GATEWAYS, START_SECONDS)
        group = Group(started.pid)
        before, since = group.pss(), group.seconds()
        listed.write_text("".join(f"unix:{folder}/{number}.sock\n" for number in range(num_workers)))
        wait_until(log, IS_EXACT, num_workers, LEARN_SECONDS)
        exact = group.seconds()
        # The model's files are tried meanwhile, once for all workers.
        time.sleep(IDLE_SECONDS)
        settled, began = group.seconds(), time.perf_counter()
        time.sleep(IDLE_SECONDS)
        idle, elapsed, after = group.seconds(), time.perf_counter() - began, group.pss()
        if (known := num_exact(port)) != NUM_GATEWAYS * num_workers:
            raise RuntimeError(f"{known} of {NUM_GATEWAYS} times {num_workers} workers are EXACT.")
    return [
        f"| {num_workers} | {role} | {exact[role] - since[role]:.1f} | {settled[role] - exact[role]:.1f} "
        f"| {100 * (idle[role] - settled[role]) / elapsed:.1f} % | {before[role]} | {after[role]} |"
        for role in sorted(before)
    ]


def run(counts: Sequence[int]) -> None:
    """Measure every count of workers, and print a page."""
    print("# What gateway processes need for many workers\n")
    print(f"- machine: {machine()}\n- commit: {commit()}\n- command: `python -m benchmarks.many_workers`\n")
    print(
        f"Every worker has the same files, with a tokenizer of {TOKENIZER_BYTES // MIB} MiB, and reports its load four "
        "times a second.\n"
    )
    print("| workers | process | CPU s until all EXACT | CPU s of the next 10 s | idle, of a core | PSS before | PSS |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for count in counts:
        with tempfile.TemporaryDirectory(prefix="saccade-") as folder:
            command = (sys.executable, "-m", "benchmarks.many_workers", "--serve", folder, "--workers", str(count))
            with subprocess.Popen(command, stdout=subprocess.PIPE) as served:
                try:
                    if served.stdout is None or served.stdout.readline() != b"ready\n":
                        raise RuntimeError("The workers did not start.")
                    print("\n".join(measure(Path(folder), count)), flush=True)
                finally:
                    served.kill()


def main() -> None:
    """Run the part that the arguments name."""
    end_with_what_was_started()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[16, 1000])
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        uvloop.run(serve(arguments.serve, arguments.workers[0]))
    else:
        run(arguments.workers)


if __name__ == "__main__":
    main()

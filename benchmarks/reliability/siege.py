"""Siege: honest clients beside one attack after the other; what they notice, against an honest load of the same size.

    python -m benchmarks.reliability.siege [ATTACK ...] [--trace-sample 1] [--out benchmarks/results/siege.md]

A server of the bundled model and everything else on loopback. An attack is a row: three times its control and then the
attack itself, five seconds each, beside honest clients with text and with images of two tenants. The attackers are a
third tenant and run at lower priority. The last row has all attacks at once, six rounds: what they leave may not grow.
Attacks by workers have a gateway of their own, whose honest clients use an honest worker; and one of two processes of a
gateway is stopped. The exit status is 1 if an honest request is refused or fails, if memory passes its budgets, if a
request of an attack does not end, or if something is left behind; times are reported only. About 25 minutes; a row
takes 45 seconds. With --trace-sample the server sends traces of this part of the requests to a collector in this
process.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from faults import PROBE, RIGHT, Quiet, WrongAnswer, outcome
from server import Server, program, serving

from benchmarks.measured import MIB, ROOT, end_with_what_was_started, free_ports
from benchmarks.reliability import siege_attackers, siege_report, siege_stopped
from benchmarks.reliability.processes import provenance, traces
from benchmarks.reliability.siege_attackers import LET_GO, Plan, line_of
from benchmarks.reliability.siege_attacks import ATTACKS, FILES, PIXELS, REQUESTS, RESPONSES
from benchmarks.reliability.siege_honest import Honest, honest
from benchmarks.reliability.siege_payloads import MAX_BODY_BYTES, MAX_CONNECTIONS
from benchmarks.reliability.siege_report import Attackers, Closing, Observation, Row
from benchmarks.reliability.siege_stopped import STOPPED, Stopped
from benchmarks.reliability.siege_watch import PRIVATE, Watch, left_behind, pids, private_mib
from benchmarks.reliability.siege_workers import urls

BUDGETS_MIB = {REQUESTS: 128, PIXELS: 64, FILES: 32, RESPONSES: 64}
"""Of the besieged server, by part; pixels are its /dev/shm, which the gateway maps."""

BUDGET_FLAGS = {
    REQUESTS: "--max-request-memory",
    PIXELS: "--shared-memory-bytes",
    FILES: "--file-store-bytes",
    RESPONSES: "--response-store-bytes",
}
SERVER_FLAGS = (
    *("--allowed-media-networks", "127.0.0.0/8", "--max-body-bytes", str(MAX_BODY_BYTES)),
    *("--max-connections", str(MAX_CONNECTIONS), "--decode-processes", "2", "--decode-memory-bytes", str(256 * MIB)),
    *(word for part, flag in BUDGET_FLAGS.items() for word in (flag, str(BUDGETS_MIB[part] * MIB))),
    *("--mm-processor-cache-gb", "0.02"),
)
CLIENTS = {"images": 4, "text": 6}
HONEST_KEYS, ATTACKER_KEY = ("honest-1", "honest-2"), "attacker"
WARM_UP_SECONDS = 5.0
NUM_PAIRS = 3
PHASE_SECONDS = 5.0
END_SECONDS = 30.0
"""For the attackers' own requests, once no new ones begin: one client's wait for one another, each up to 10 s."""

NUM_ROUNDS = 6
LEFT_SECONDS = 10.0
START_SECONDS = 60.0
LINE_BYTES = 1 << 22
BY_CLIENTS = tuple(name for name, attack in ATTACKS.items() if not attack.is_by_worker)
BY_WORKERS = tuple(name for name, attack in ATTACKS.items() if attack.is_by_worker)
ALL = (*ATTACKS, STOPPED)


@dataclass(frozen=True)
class Siege:
    """The server, its honest load, and the attackers' process."""

    server: Server
    load: Honest
    attackers: asyncio.subprocess.Process

    async def run_phase(self, phase: siege_attackers.Phase) -> Observation:
        """Run attackers and honest clients together."""
        self._tell(line_of(phase))
        with Watch(self.server) as watch:
            seen = await self.load.run(PHASE_SECONDS)
        return Observation(seen, watch.peaks[PRIVATE], await self._let_go())

    async def run_row(self, name: str) -> Row:
        """Run the pairs of an attack."""
        before = private_mib(self.server)
        pairs = []
        for number in range(NUM_PAIRS):
            end_seconds = END_SECONDS if number == NUM_PAIRS - 1 else 0.0
            control = await self.run_phase(siege_attackers.Phase((name,), True, 0.0))
            pairs.append((control, await self.run_phase(siege_attackers.Phase((name,), False, end_seconds))))
        return Row(name, before, pairs)

    async def close(self, before: dict[str, set[int]], quiet: Quiet) -> Closing:
        """Attack with everything, round after round; then look at what is left."""
        before_mib, rounds, kept = private_mib(self.server), [], []
        for _ in range(NUM_ROUNDS):
            rounds.append(await self.run_phase(siege_attackers.Phase(BY_CLIENTS, False, 0.0)))
            await asyncio.sleep(LEFT_SECONDS)
            kept.append(private_mib(self.server))
        left = await asyncio.to_thread(left_behind, self.server, before, time.monotonic() + LEFT_SECONDS)
        try:
            after = await asyncio.to_thread(outcome, self.server, PROBE, quiet[PROBE])
        except WrongAnswer:
            after = "wrong answer"
        if after != RIGHT:
            left.append(f"a request sent afterwards: {after}")
        return Closing(before_mib, rounds, kept, left)

    def _tell(self, line: str) -> None:
        if self.attackers.stdin is None:
            raise RuntimeError("the attackers have no standard input")
        self.attackers.stdin.write(f"{line}\n".encode())

    async def _let_go(self) -> Attackers:
        self._tell(LET_GO)
        if self.attackers.stdout is None:
            raise RuntimeError("the attackers have no standard output")
        async with asyncio.timeout(START_SECONDS):
            seen: Attackers = json.loads(await self.attackers.stdout.readline())
        return seen


@contextlib.asynccontextmanager
async def attackers_of(
    server: Server, folder: str = "", ports: tuple[int, ...] = ()
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run the attackers' process while the block runs. With a *folder* it has hostile workers, there and at *ports*."""
    plan = line_of(Plan(server.port, server.name, ATTACKER_KEY, folder, ports))
    command = (sys.executable, "-m", siege_attackers.__name__, plan)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, cwd=ROOT, start_new_session=True, limit=LINE_BYTES
    )
    try:
        async with asyncio.timeout(START_SECONDS):
            if process.stdout is None or await process.stdout.readline() != b"ready\n":
                raise RuntimeError("the attackers did not get ready")
        yield process
    finally:
        process.kill()
        await process.wait()


async def besiege(
    server: Server, names: tuple[str, ...], has_closing: bool, folder: str = "", ports: tuple[int, ...] = ()
) -> tuple[list[Row], Closing | None]:
    """Run the rows of *names*, and the closing one if wanted; hostile workers are in *folder* and at *ports*."""
    load = honest(server, HONEST_KEYS, CLIENTS, has_probes=True)
    quiet = Quiet(server)
    await asyncio.to_thread(quiet.learn, PROBE)
    async with attackers_of(server, folder, ports) as attackers:
        # Meanwhile the gateway learns of its hostile workers, too.
        await load.run(WARM_UP_SECONDS)
        before = await asyncio.to_thread(pids, server)
        siege = Siege(server, load, attackers)
        rows = []
        for name in names:
            rows.append(await siege.run_row(name))
            print(siege_report.line(rows[-1], BUDGETS_MIB), flush=True)
        return rows, await siege.close(before, quiet) if has_closing else None


@contextlib.contextmanager
def besieged_server(flags: tuple[str, ...], word: Literal["serve", "gateway"] = "serve") -> Iterator[Server]:
    """Start the server; what it logs goes to a file that is thrown away, unless the block fails."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        named = [word for key in (*HONEST_KEYS, ATTACKER_KEY) for word in ("--api-key", key)]
        try:
            with serving(*flags, *named, key=HONEST_KEYS[0], log=log, word=word) as server:
                yield server
        except Exception:
            print(log.read_text(errors="replace")[-4000:], file=sys.stderr)
            raise


def by_clients(
    names: tuple[str, ...], flags: tuple[str, ...], left: list[str], has_closing: bool
) -> tuple[list[Row], Closing | None]:
    """Run the rows of *names* that clients attack in; add to *left* what a server leaves."""
    chosen = tuple(name for name in names if name in BY_CLIENTS)
    if not chosen:
        return [], None
    with ended(left) as tree, besieged_server(SERVER_FLAGS + flags) as server:
        result = asyncio.run(besiege(server, chosen, has_closing))
        tree += server.tree()
        return result


def by_workers(names: tuple[str, ...], flags: tuple[str, ...], left: list[str]) -> list[Row]:
    """As by_clients(), of the attacks by workers of a gateway."""
    chosen = tuple(name for name in names if name in BY_WORKERS)
    if not chosen:
        return []
    with tempfile.TemporaryDirectory() as folder:
        honest_url, ports = f"unix:{folder}/honest.sock", tuple(free_ports(3))
        workers = [word for url in (honest_url, *urls(folder, ports)) for word in ("--worker-url", url)]
        with (
            program("worker", "--uds", f"{folder}/honest.sock", "--dtype", "float32", "--no-summary"),
            ended(left) as tree,
            besieged_server((*SERVER_FLAGS, *flags, *workers), "gateway") as server,
        ):
            rows, _ = asyncio.run(besiege(server, chosen, False, folder, ports))
            tree += server.tree()
            return rows


def stopped_process(names: tuple[str, ...], flags: tuple[str, ...], left: list[str]) -> Stopped | None:
    """Stop one of two processes of a gateway, if *names* has that."""
    if STOPPED not in names:
        return None
    with ended(left) as tree, besieged_server((*SERVER_FLAGS, *flags, "--gateway-processes", "2")) as server:
        load = honest(server, HONEST_KEYS, CLIENTS, has_probes=True)
        stopped = asyncio.run(siege_stopped.stop_one(server, load))
        print(*stopped.report(), flush=True)
        tree += server.tree()
        return stopped


@contextlib.contextmanager
def ended(left: list[str]) -> Iterator[list[psutil.Process]]:
    """Yield a list for a server's processes; once it has stopped, add to *left* how many still run."""
    tree: list[psutil.Process] = []
    yield tree
    if count := sum(process.is_running() for process in tree):
        left.append(f"the server left {count} processes")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=f"by default all: {', '.join(ALL)}")
    parser.add_argument("--trace-sample", type=float, metavar="PART", help="send traces of this part of the requests")
    parser.add_argument("--out", type=Path, help="by default benchmarks/results/siege.md, if all attacks run")
    return parser


def main() -> int:
    """Run, write the report, return the exit status."""
    parser = _parser()
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.attacks if name not in ALL]:
        parser.error(f"no such attack: {', '.join(unknown)}")
    end_with_what_was_started()
    # A shell that starts this program in the background has SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    names = tuple(arguments.attacks) or ALL
    left: list[str] = []
    with traces(arguments.trace_sample) as traced:
        rows, closing = by_clients(names, traced.flags, left, has_closing=not arguments.attacks)
        rows += by_workers(names, traced.flags, left)
        stopped = stopped_process(names, traced.flags, left)
    faults = siege_report.faults(rows, closing, BUDGETS_MIB) + traced.violations() + left
    faults += stopped.faults() if stopped is not None else []
    where = [*provenance(), f"- server: `saccade serve {' '.join(SERVER_FLAGS)}`", *traced.report()]
    report = siege_report.report(rows, closing, faults, BUDGETS_MIB, stopped.report() if stopped is not None else [])
    text = "\n".join(["# Siege", "", *where, "", *report]) + "\n"
    if out := arguments.out or (None if arguments.attacks else ROOT / "benchmarks/results/siege.md"):
        out.write_text(text)
    print(text)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

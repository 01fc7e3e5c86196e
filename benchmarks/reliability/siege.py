"""Siege: a real server, honest clients, and beside them every attack at once; what the honest clients notice of it.

    python -m benchmarks.reliability.siege [--minutes 5] [--keys] [--trace-sample 1] [--out benchmarks/results/siege.md]
    python -m benchmarks.reliability.siege --only tarpit [--minutes 3] [--out benchmarks/results/siege-tarpit.md]

The bundled model, everything on loopback. Eight clients with images and eight with text ask in a closed loop, first
alone (quiet), then beside the attacks of .siege_attacks (besieged). Attackers use other addresses than honest clients;
with --keys they also use a key of their own. The exit status is 1 where an honest request is refused or fails, memory
passes its budget, or something is left behind 10 s after the attackers stopped; times are reported only.
Before that, the largest bodies are sent for BODIES_SECONDS to the server alone, refused or abandoned.
With --only one attack runs, beside text alone, in turn: quiet, attack, quiet, attack.
With --trace-sample the server sends traces of this part of the requests to a collector in this process.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

from faults import PROBE, RIGHT, Quiet, WrongAnswer, outcome
from server import Server, serving

from benchmarks.measured import MIB, ROOT, end_with_what_was_started
from benchmarks.reliability import siege_report
from benchmarks.reliability.processes import provenance, traces
from benchmarks.reliability.siege_attacks import ATTACKS, Plan, encoded
from benchmarks.reliability.siege_honest import Honest, honest
from benchmarks.reliability.siege_payloads import MAX_BODY_BYTES
from benchmarks.reliability.siege_report import Phase, Siege
from benchmarks.reliability.siege_watch import PRIVATE, TREE, Watch, left_behind, pids

REQUEST_MEMORY_BYTES = 128 * MIB
MEMORY_FLAG = "--max-request-memory"
DECODE_PROCESSES, DECODE_MEMORY_BYTES = 2, 256 * MIB
SHARED_MEMORY_BYTES = 64 * MIB
SERVER_FLAGS = (
    *("--allowed-media-networks", "127.0.0.0/8", "--max-body-bytes", str(MAX_BODY_BYTES)),
    *("--decode-processes", str(DECODE_PROCESSES), "--decode-memory-bytes", str(DECODE_MEMORY_BYTES)),
    *("--shared-memory-bytes", str(SHARED_MEMORY_BYTES), "--mm-processor-cache-gb", "0.02"),
)
CLIENTS = {"images": 8, "text": 8}
TEXT_CLIENTS = {"text": 8}
HONEST_KEYS, ATTACKER_KEY = ("honest-1", "honest-2"), "attacker"
WARM_UP_SECONDS = 5.0
BODIES = ("maximal bodies", "abandoned bodies")
"""Few and large: many small requests would have Python's collector run, and hide what the large ones leave."""

BODIES_SECONDS = 30.0
QUIET_PART, BESIEGED_PART = 0.3, 0.6
ONLY_PART = 0.225
LEFT_SECONDS = 10.0
END_SECONDS = 15.0
BUILD_SECONDS = 60.0


async def run_phase(phase: Phase, server: Server, load: Honest, seconds: float) -> None:
    """Run the honest load for so long, watch the server, and add what was seen to *phase*."""
    with Watch(server) as watch:
        seen = await load.run(seconds)
    phase.seen.add(seen)
    phase.peaks = {name: max(value, phase.peaks.get(name, 0.0)) for name, value in watch.peaks.items()}
    phase.cores = watch.cores
    phase.seconds += seconds


@contextlib.asynccontextmanager
async def attacking(plan: Plan, into: list[dict[str, Any]]) -> AsyncIterator[None]:
    """Attack while the block runs; what the attackers saw is appended to *into*."""
    command = (sys.executable, "-m", f"{__package__}.siege_attacks", encoded(plan))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, cwd=ROOT, start_new_session=True, limit=MIB
    )
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the attackers have no pipes")
    try:
        async with asyncio.timeout(BUILD_SECONDS):
            if await process.stdout.readline() != b"ready\n":
                raise RuntimeError("the attackers did not get ready")
        process.stdin.write(b"go\n")
        yield
        process.stdin.close()
        async with asyncio.timeout(END_SECONDS):
            into.append(json.loads(await process.stdout.readline()))
            await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def send_bodies(server: Server, key: str | None, siege: Siege) -> None:
    """Attack with bodies alone, and note the memory before and meanwhile."""
    with Watch(server) as before:
        await asyncio.sleep(1.0)
    async with attacking(Plan(server.port, server.name, key, BODIES, 2 * BODIES_SECONDS), siege.attackers):
        with Watch(server) as meanwhile:
            await asyncio.sleep(BODIES_SECONDS)
    siege.bodies_alone = (before.peaks, meanwhile.peaks)


async def besiege(server: Server, load: Honest, attacks: tuple[str, ...], seconds: list[tuple[bool, float]]) -> Siege:
    """Run phases in turn, each besieged or not, for so many seconds; then look at what is left behind."""
    siege = Siege()
    key = ATTACKER_KEY if load.keys else None
    quiet = Quiet(server)
    await asyncio.to_thread(quiet.learn, PROBE)
    await load.run(WARM_UP_SECONDS)
    before = await asyncio.to_thread(pids, server)
    if len(attacks) > 1:
        await send_bodies(server, key, siege)
    for is_besieged, duration in seconds:
        if not is_besieged:
            peaks = siege.quiet.peaks
            await run_phase(siege.quiet, server, load, duration)
            # Memory of an attack before may be kept.
            siege.quiet.peaks = peaks or siege.quiet.peaks
            continue
        async with attacking(Plan(server.port, server.name, key, attacks, 2 * duration + 120), siege.attackers):
            await run_phase(siege.besieged, server, load, duration)
    stopped_at = time.monotonic()
    siege.left = await asyncio.to_thread(left_behind, server, before, stopped_at + LEFT_SECONDS)
    try:
        after = await asyncio.to_thread(outcome, server, PROBE, quiet[PROBE])
    except WrongAnswer:
        after = "wrong answer"
    if after != RIGHT:
        siege.left.append(f"a request sent afterwards: {after}")
    return siege


def takes(flag: str) -> bool:
    """Whether `saccade serve` has *flag*."""
    command = (sys.executable, "-m", "saccade.cli.main", "serve", "--help-all")
    return flag in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def budgets(flags: tuple[str, ...]) -> Mapping[str, float]:
    """Return the stated budgets in MiB, by what they bound."""
    decoding = (DECODE_PROCESSES * DECODE_MEMORY_BYTES + SHARED_MEMORY_BYTES) / MIB
    if MEMORY_FLAG not in flags:
        return {}
    requests = REQUEST_MEMORY_BYTES / MIB
    return {PRIVATE: requests, TREE: requests + decoding}


@contextlib.contextmanager
def besieged_server(flags: tuple[str, ...], keys: tuple[str, ...]) -> Iterator[Server]:
    """Start the server; what it logs goes to a file that is thrown away, unless the block fails."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        named = [word for key in keys for word in ("--api-key", key)]
        try:
            with serving(*flags, *named, key=keys[0] if keys else "none", log=log) as server:
                yield server
        except Exception:
            print(log.read_text(errors="replace")[-4000:], file=sys.stderr)
            raise


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="by default 5, or 3 with --only")
    parser.add_argument("--keys", action="store_true", help="two tenants and the attackers with a key each")
    parser.add_argument("--trace-sample", type=float, metavar="PART", help="send traces of this part of the requests")
    parser.add_argument("--only", choices=ATTACKS, metavar="ATTACK", help=f"one of: {', '.join(ATTACKS)}")
    parser.add_argument("--out", type=Path, help="by default benchmarks/results/siege.md, or siege-ATTACK.md")
    return parser


def main() -> int:
    """Run, write the report, return the exit status."""
    arguments = _parser().parse_args()
    end_with_what_was_started()
    # A shell that starts this program in the background has SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    suffix = f"-{arguments.only.replace(' ', '-')}" if arguments.only else "-keys" if arguments.keys else ""
    suffix += "" if arguments.trace_sample is None else "-traced"
    out = arguments.out or ROOT / f"benchmarks/results/siege{suffix}.md"
    minutes = arguments.minutes or (3.0 if arguments.only else 5.0)
    flags = SERVER_FLAGS + ((MEMORY_FLAG, str(REQUEST_MEMORY_BYTES)) if takes(MEMORY_FLAG) else ())
    keys = (*HONEST_KEYS, ATTACKER_KEY) if arguments.keys else ()
    phases = [(False, QUIET_PART * 60 * minutes), (True, BESIEGED_PART * 60 * minutes)]
    if arguments.only:
        phases = [(False, ONLY_PART * 60 * minutes), (True, ONLY_PART * 60 * minutes)] * 2
    with traces(arguments.trace_sample) as traced, besieged_server(flags + traced.flags, keys) as server:
        clients = TEXT_CLIENTS if arguments.only else CLIENTS
        load = honest(server, HONEST_KEYS if keys else (), clients, has_probes=not arguments.only)
        siege = asyncio.run(besiege(server, load, (arguments.only,) if arguments.only else tuple(ATTACKS), phases))
        tree = server.tree()
    if server.process.returncode or any(process.is_running() for process in tree):
        siege.left.append(f"the server ended with {server.process.returncode}, or left a process")
    siege.left += traced.violations()
    verdicts = siege_report.verdicts(siege, budgets(flags), bool(arguments.only))
    where = [*provenance(), f"- server: `saccade serve {' '.join(flags)}`", *traced.report()]
    text = "\n".join(["# Siege", "", *where, "", *siege_report.report(siege, verdicts)]) + "\n"
    out.write_text(text)
    print(text)
    return 1 if any(verdict.fails for verdict in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())

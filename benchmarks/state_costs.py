"""What a gateway's database costs it: the processor time of its threads to store and read a response, and for a limit.

    python -m benchmarks.state_costs [--state postgresql://...] [--repeats 5] [--write]

The operations run in turn, and the fastest repeat of each counts, because other work on the machine only adds to the
time. With `--write` the figures go to benchmarks/results/state-costs.md.
"""

import argparse
import asyncio
import os
import platform
import secrets
import sqlite3
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import uvloop

from benchmarks.measured import ROOT, commit, machine
from saccade.gateway.apis.responses.state_store import StateResponseStore
from saccade.gateway.apis.responses.store import StoredResponse
from saccade.gateway.chat_request import ChatMessage
from saccade.gateway.state.settings import StateSettings
from saccade.gateway.state.state import State
from saccade.gateway.tenants.account import Account, Ledger, Limits, Tenant
from saccade.gateway.tenants.shared_limits import SharedLimits
from saccade.gateway.usage_log import UsageLog

NUM_RESPONSES = 500
NUM_REQUESTS = 20_000
BODY_BYTES = 2048
WAL_BYTES = 9 * 4096
"""What SQLite appends to its log for a response of BODY_BYTES."""
PER_MINUTE = 1_000_000_000
TENANT = b"t" * 16
OUT = ROOT / "benchmarks/results/state-costs.md"


Operation = tuple[int, Callable[[], Awaitable[None]]]
"""A number of equal operations, and what executes them."""


async def fastest(operations: Mapping[str, Operation], repeats: int) -> dict[str, float]:
    """Return the processor time of the process for one of each of *operations*, in ms. They run in turn."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(repeats):
        for name, (number, run) in operations.items():
            begin = time.process_time()
            await run()
            times[name].append((time.process_time() - begin) / number * 1000)
    return {name: min(measured) for name, measured in times.items()}


def responses(state: State) -> dict[str, Operation]:
    """Return how a response of 2 KB is stored, shown and continued."""
    store, message = (
        StateResponseStore(state, 1 << 26, 1 << 20),
        ChatMessage(role="user", content="x" * (BODY_BYTES // 2)),
    )
    names: list[str] = []

    async def put() -> None:
        names[:] = [secrets.token_hex(16) for _ in range(NUM_RESPONSES)]
        for name in names:
            assert await store.put(TENANT, name, StoredResponse(None, (message,), bytes(BODY_BYTES)))

    async def show() -> None:
        for name in names:
            await store.body(TENANT, name)

    async def go_on() -> None:
        for name in names:
            await store.conversation(TENANT, name)

    return {
        "a response of 2 KB is stored": (NUM_RESPONSES, put),
        "it is shown": (NUM_RESPONSES, show),
        "it is read to be continued": (NUM_RESPONSES, go_on),
    }


def writes(descriptor: int, threads: ThreadPoolExecutor) -> dict[str, Operation]:
    """Return how a thread writes as many bytes as SQLite for a response, and waits until they are on the disk."""

    def write() -> None:
        os.pwrite(descriptor, bytes(WAL_BYTES), 0)
        os.fsync(descriptor)

    async def run() -> None:
        for _ in range(NUM_RESPONSES):
            await asyncio.get_running_loop().run_in_executor(threads, write)

    return {f"for comparison: a thread writes {WAL_BYTES} bytes to the disk": (NUM_RESPONSES, run)}


def requests(state: State) -> dict[str, Operation]:
    """Return how requests are counted whose limits hold at a gateway, or over all gateways with units left here."""
    tenant = Tenant(TENANT, name="acme", limits=Limits(PER_MINUTE, PER_MINUTE, PER_MINUTE))
    accounts = {
        "a request with limits of this gateway alone": Account(tenant),
        "a request with limits over all gateways": Account(tenant, ledger=Ledger(UsageLog(), SharedLimits(state))),
    }

    async def ask(account: Account) -> None:
        for _ in range(NUM_REQUESTS):
            await account.prepare()
            with account.request() as charge:
                charge.model = "m"
                account.use_prompt(100, "m")
                account.use_answer(100, "m")

    return {name: (NUM_REQUESTS, partial(ask, account)) for name, account in accounts.items()}


async def measure(location: str, folder: Path, repeats: int) -> dict[str, float]:
    """Return the milliseconds of each operation."""
    state = State.of_settings(StateSettings(location, folder / "key"), tenant_files=1)
    assert state is not None
    await state.start()
    try:
        with ThreadPoolExecutor(1) as threads, (folder / "file").open("wb") as file:
            operations = {**responses(state), **writes(file.fileno(), threads), **requests(state)}
            return await fastest(operations, repeats)
    finally:
        await state.close()


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", default="", help="a URL of PostgreSQL; by default SQLite")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        location = arguments.state or str(Path(folder) / "state")
        costs = uvloop.run(measure(location, Path(folder), arguments.repeats))
    name = "PostgreSQL" if arguments.state else f"SQLite {sqlite3.sqlite_version}"
    lines = [
        "# What the database costs a gateway",
        "",
        f"- machine: {machine()}; Python {platform.python_version()}, {name}",
        f"- commit: {commit()}",
        f"- command: `python -m benchmarks.state_costs --repeats {arguments.repeats}`",
        "",
        "| | ms of processor time, in all threads |",
        "|---|---|",
        *(f"| {what} | {milliseconds:.3f} |" for what, milliseconds in costs.items()),
    ]
    print("\n".join(lines))
    if arguments.write:
        OUT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

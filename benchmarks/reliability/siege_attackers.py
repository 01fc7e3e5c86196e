"""The attackers of a siege, in a process of their own and of lower priority; its argument is a Plan in JSON.

The program prints "ready" when it can begin. A line of standard input is a Phase; its attackers run until the next line
"let go". Then no attempt begins, those under way get Phase.end_seconds, and what was seen is printed as one JSON
object. The program ends with standard input.
"""

import asyncio
import contextlib
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field

from benchmarks.reliability.siege_attacks import ATTACKS, Attempt, address_of
from benchmarks.reliability.siege_client import Target
from benchmarks.reliability.siege_hosts import hosting
from benchmarks.reliability.siege_workers import hostile_workers

NICENESS = 10

LET_GO = "let go"


@dataclass(frozen=True)
class Plan:
    """The server under attack: its port, its model, the attackers' key.

    If it has hostile workers, these are in *folder* and at *ports*.
    """

    port: int
    model: str
    key: str
    folder: str = ""
    ports: tuple[int, ...] = ()


@dataclass(frozen=True)
class Phase:
    """Which attacks run, or their controls. Attempts get *end_seconds* to end once no new ones begin."""

    attacks: tuple[str, ...]
    is_control: bool
    end_seconds: float


@dataclass
class Tally:
    """What one attack saw: seconds of its attempts by outcome, and how many were open at the end."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    num_open: int = 0
    errors: Counter[str] = field(default_factory=Counter)

    def summary(self) -> dict[str, object]:
        """Return it for the report: by outcome how often, and after how many seconds."""
        outcomes = {
            outcome: {"count": len(values), "median": statistics.median(values), "max": max(values)}
            for outcome, values in self.seconds.items()
        }
        return {"outcomes": outcomes, "open": self.num_open, "errors": dict(self.errors)}


async def work(name: str, attempt: Attempt, number: int, target: Target, tally: Tally, ended: asyncio.Event) -> None:
    """Repeat one worker's attempts until *ended*."""
    attack = ATTACKS[name]
    await _wait(ended, number * min(attack.pause_seconds, 1.0) / attack.workers)
    while not ended.is_set():
        began = time.monotonic()
        outcome = "failed"
        try:
            outcome = await attempt(target, address_of(name), number)
        except asyncio.CancelledError:
            tally.num_open += 1
            raise
        except ConnectionRefusedError:
            outcome = "connection refused"
        except OSError:
            outcome = "connection broken"
        except ValueError as error:
            tally.errors[str(error)] += 1
        tally.seconds.setdefault(outcome, []).append(time.monotonic() - began)
        await _wait(ended, began + attack.pause_seconds - time.monotonic())


async def _wait(ended: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(ended.wait(), max(0.0, seconds))


async def run_phase(phase: Phase, target: Target, let_go: asyncio.Event) -> dict[str, dict[str, object]]:
    """Attack until *let_go*, and return what was seen by attack."""
    tallies = {name: Tally() for name in phase.attacks}
    workers = [
        asyncio.create_task(work(name, attempt, number, target, tallies[name], let_go))
        for name in phase.attacks
        for attempt in [ATTACKS[name].control if phase.is_control else ATTACKS[name].attempt]
        for number in range(ATTACKS[name].workers)
    ]
    await let_go.wait()
    _, still = await asyncio.wait(workers, timeout=phase.end_seconds)
    for worker in still:
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)
    return {name: tally.summary() for name, tally in tallies.items()}


async def lines() -> AsyncIterator[str]:
    """Yield the lines of standard input."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield line.decode().strip()


async def attack(plan: Plan) -> None:
    """Run phase after phase as standard input says."""
    async with contextlib.AsyncExitStack() as stack:
        hosts = await stack.enter_async_context(hosting())
        target = Target(plan.port, plan.model, plan.key, hosts)
        if plan.folder:
            target.workers = await stack.enter_async_context(hostile_workers(plan.folder, plan.ports))
        print("ready", flush=True)
        running: asyncio.Task[dict[str, dict[str, object]]] | None = None
        let_go = asyncio.Event()
        async for line in lines():
            if line != LET_GO:
                let_go = asyncio.Event()
                running = asyncio.create_task(run_phase(phase_of(line), target, let_go))
            elif running is not None:
                let_go.set()
                print(json.dumps(await running), flush=True)


def phase_of(line: str) -> Phase:
    """Return the phase that a line of JSON describes."""
    fields = json.loads(line)
    return Phase(**{**fields, "attacks": tuple(fields["attacks"])})


def line_of(value: Plan | Phase) -> str:
    """Return a plan or a phase as a line."""
    return json.dumps(asdict(value))


def main() -> None:
    """Attack as the argument says."""
    os.nice(NICENESS)
    asyncio.run(attack(Plan(**json.loads(sys.argv[1]))))


if __name__ == "__main__":
    main()

"""One of two processes of a gateway is stopped: what honest clients notice until its parent ends it, and afterwards."""

import asyncio
import dataclasses
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
from server import Server

from benchmarks.reliability.siege_honest import Honest, Seen

STOPPED = "a stopped gateway process"
PATIENCE_SECONDS = 3.0
"""Of a client, which then tries again over a new connection; half of these reach the process that runs."""

CONTROL_SECONDS, AFTER_SECONDS = 10.0, 5.0
MOST_SECONDS = 60.0
"""Until another process is there: six missed answers, one every 5 s, and the start."""

LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Stopped:
    """What honest clients saw before, during and after; *seconds* until another process was there, None for never."""

    before: Seen
    during: Seen
    after: Seen
    seconds: float | None

    def faults(self) -> list[str]:
        """Return in words what must not be."""
        found = [] if self.seconds is not None else ["it is not replaced"]
        found += [] if self.during.num_answers else ["nobody is served meanwhile"]
        failed = {"before": self.before, "after": self.after}
        found += [f"{when} {what}" for when, seen in failed.items() for what in seen.failures + seen.not_as_expected]
        return [f"{STOPPED}: {what}" for what in found]

    def report(self) -> list[str]:
        """Return a line of Markdown."""
        during = self.during.failures + self.during.not_as_expected
        failed = ", ".join(f"{count} x {what}" for what, count in during.most_common()) or "none"
        until = f"replaced after {self.seconds:.0f} s" if self.seconds is not None else "not replaced"
        return [
            f"{STOPPED.capitalize()} of two: {until}. Meanwhile {self.during.num_answers} answers; clients that gave "
            f"up after {PATIENCE_SECONDS:g} s, or were cut off: {failed}. Afterwards {self.after.num_answers} answers "
            f"in {AFTER_SECONDS:g} s, and {self.after.failures.total()} failures; before, {self.before.num_answers} "
            f"in {CONTROL_SECONDS:g} s."
        ]


async def stop_one(server: Server, load: Honest) -> Stopped:
    """Stop a process of *server*'s gateway while honest clients ask, until it is replaced."""
    before = await load.run(CONTROL_SECONDS)
    members = _members(server)
    os.kill(members[0].pid, signal.SIGSTOP)
    replacing = asyncio.create_task(_replaced(server, members))
    during, seconds = Seen(), None
    patient = dataclasses.replace(load, patience_seconds=PATIENCE_SECONDS)
    while not replacing.done():
        during.add(await patient.run(AFTER_SECONDS))
    seconds = await replacing
    return Stopped(before, during, await load.run(AFTER_SECONDS), seconds)


async def _replaced(server: Server, members: Sequence[psutil.Process]) -> float | None:
    """Return after how many seconds there are as many processes again, without the first; None for never."""
    began = time.monotonic()
    while (seconds := time.monotonic() - began) < MOST_SECONDS:
        now = await asyncio.to_thread(_members, server)
        if members[0] not in now and len(now) == len(members):
            return seconds
        await asyncio.sleep(LOOK_SECONDS)
    return None


def _members(server: Server) -> list[psutil.Process]:
    return [process for process in server.tree() if process.is_running() and _is_member(process)]


def _is_member(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return "--group-member" in words and words[words.index("--group-member") + 1].isdigit()

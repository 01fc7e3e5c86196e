"""Start a program that does not outlive its parent.

Linux sends a process the signal it asked for by PR_SET_PDEATHSIG (prctl(2)) when its parent dies. This file is also the
small program that asks for it and then becomes the real one, so that any program can be started so, and so that the
parent needs no code between fork and exec, where threads of gRPC may hold locks.
"""

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Mapping, Sequence

PR_SET_PDEATHSIG = 1


async def start(
    command: Sequence[str],
    *,
    signal_at_parents_death: signal.Signals,
    pass_fds: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
) -> asyncio.subprocess.Process:
    """Start *command* in a process group of its own; its standard input is empty, its output goes where ours goes."""
    prefix = [sys.executable, "-S", "-E", __file__, str(int(signal_at_parents_death)), str(os.getpid())]
    return await asyncio.create_subprocess_exec(
        *prefix,
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        pass_fds=tuple(pass_fds),
        env=environment,
    )


def tie_to_parent(signal_at_parents_death: signal.Signals) -> None:
    """Have this process get the signal when its parent dies. One that is dead already is the caller's to notice."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal_at_parents_death), 0, 0, 0)


def become(arguments: Sequence[str]) -> None:
    """Become arguments[2:], tied to the parent: arguments[0] is the signal, arguments[1] the parent's pid.

    The process group of its own keeps a terminal's Ctrl-C away from it: its parent decides who stops when.
    """
    number, parent, *command = arguments
    os.setpgid(0, 0)
    tie_to_parent(signal.Signals(int(number)))
    if os.getppid() != int(parent):
        return
    os.execvp(command[0], command)  # noqa: S606


if __name__ == "__main__":
    become(sys.argv[1:])

"""A small program that ties a process to its parent's life and then becomes the real program.

Linux sends a process the signal that it asked for with PR_SET_PDEATHSIG (prctl(2)) when the thread that started it
ends. This file runs before the real program, so that any program can be tied. The parent then needs no code between
fork and exec, when gRPC's threads may hold locks.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def tied(command: Sequence[str], signal_at_parents_death: signal.Signals) -> list[str]:
    """Return a command that runs *command* in its own process group. The kernel signals it when this process dies."""
    return [sys.executable, "-S", "-E", __file__, str(int(signal_at_parents_death)), str(os.getpid()), *command]


def tie_to_parent(signal_at_parents_death: signal.Signals) -> None:
    """Have the kernel signal this process when its parent dies.

    The caller must check whether the parent has died already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal_at_parents_death), 0, 0, 0)


def become(arguments: Sequence[str]) -> None:
    """Become arguments[2:], tied to the parent: arguments[0] is the signal, arguments[1] the parent's pid.

    If the parent has died already, return. The program gets its own process group, which keeps a terminal's Ctrl-C away
    from it: its parent decides when it stops.
    """
    number, parent, *command = arguments
    os.setpgid(0, 0)
    tie_to_parent(signal.Signals(int(number)))
    if os.getppid() != int(parent):
        return
    os.execvp(command[0], command)  # noqa: S606


if __name__ == "__main__":
    become(sys.argv[1:])

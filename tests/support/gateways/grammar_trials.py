"""The processes in which a gateway in this process tries grammars."""

import contextlib

import psutil

from saccade.gateway.structured_output import trial


def children() -> list[psutil.Process]:
    """Return those that run."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if trial.PROGRAM in child.cmdline():
                found.append(child)
    return found

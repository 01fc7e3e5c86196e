"""Runs a program that uses a database and says on stdout what is acknowledged, and kills it."""

import signal
import subprocess
import sys
import time
from pathlib import Path


def lines_until_killed(program: Path, *words: str, seconds: float | None = None) -> list[str]:
    """Run *program*, kill it *seconds* after its first line unless it ends itself, and return its whole lines."""
    process = subprocess.Popen([sys.executable, program, *words], stdout=subprocess.PIPE)
    assert process.stdout is not None
    output = process.stdout.readline()
    if seconds is not None:
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
    output += process.stdout.read()
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    *whole, _ = output.decode().split("\n")
    return whole

"""Run a client's program, and read its results."""

import json
import os
import subprocess
from pathlib import Path

from environments import Program, command
from results import Result

PROGRAM_SECONDS = 600
INHERITED = ("PATH", "HOME", "LANG")
"""What a program sees of this process's environment: no key, no address of another server."""


def run(program: Program, cache: Path, settings: dict[str, str]) -> list[Result]:
    """Run the program in its environment; one that says nothing, or fails otherwise, is a row, too."""
    try:
        words = command(program, cache)
    except (OSError, subprocess.CalledProcessError) as error:
        return [Result(program.name, "", "installation", False, str(error))]
    environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
    try:
        done = subprocess.run(
            words, env={**environment, **settings}, stdout=subprocess.PIPE, text=True, timeout=PROGRAM_SECONDS
        )
    except subprocess.TimeoutExpired:
        return [Result(program.name, "", "the program", False, f"no end within {PROGRAM_SECONDS} s")]
    results = read_results(done.stdout)
    if done.returncode or not results:
        results.append(Result(program.name, "", "the program", False, f"exit code {done.returncode}"))
    return results


def read_results(text: str) -> list[Result]:
    """The results among the lines of a program's output, where its client may write, too."""
    found = []
    for line in text.splitlines():
        if line.startswith('{"client"'):
            found.append(Result(**json.loads(line)))
    return found

"""Which parts run in the minutes that there are: the most important first, each in a process, none twice."""

import hashlib
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

PASSED, FAILED, NOT_RUN = "passed", "FAILED", "not run"
DONE, REFUSED, BROKEN, LATE = "done", "refused", "broken", "out of time"
PATIENCE = 3
"""A part may take this many times its estimate."""


class Row(NamedTuple):
    """What was checked or measured, the result or figure, and the difference, the reason or the circumstances."""

    name: str
    result: str
    detail: str = ""


@dataclass(frozen=True)
class Part:
    """A part of the benchmark. It takes about *seconds* on an H100."""

    name: str
    about: str
    seconds: int


@dataclass
class Record:
    """The results of a part so far. *identity* names commit, machine and libraries; *reason* is against it, if any."""

    identity: str
    outcome: str = BROKEN
    reason: str = ""
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)

    @property
    def is_final(self) -> bool:
        """Whether another run of the same commit on the same machine would find nothing new."""
        return self.outcome in (DONE, REFUSED)

    def write(self, path: Path) -> None:
        """Replace the file of the part."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".part").write_text(json.dumps(asdict(self), indent=1))
        path.with_suffix(".part").rename(path)


def read(path: Path) -> Record | None:
    """Return the record in a file that `Record.write` made; None without one."""
    if not path.exists():
        return None
    values = json.loads(path.read_text())
    return Record(**{**values, "rows": [Row(*row) for row in values["rows"]]})


def identity_of(findings: Mapping[str, str]) -> str:
    """Return the identity of what was found: results of another one do not count."""
    return hashlib.sha256(json.dumps(findings, sort_keys=True).encode()).hexdigest()[:12]


Run = Callable[[Part, float], None]
"""Runs a part for at most as many seconds, and leaves its record in its file."""


def go(parts: Sequence[Part], folder: Path, identity: str, seconds: float, run: Run) -> Iterator[tuple[Part, Record]]:
    """Run *parts* in order within *seconds*; yield each with its record.

    A part that has a final record of this *identity* is not run again. A part whose estimate is longer than what is
    left is passed over, and shorter ones after it still run.
    """
    deadline = time.monotonic() + seconds
    for part in parts:
        path = folder / f"{part.name}.json"
        record = read(path)
        if record is None or record.identity != identity or not record.is_final:
            left = deadline - time.monotonic()
            if left < part.seconds:
                rows = record.rows if record is not None and record.identity == identity else []
                reason = f"it takes about {part.seconds} s, and {max(0, left):.0f} s are left"
                yield part, Record(identity, LATE, reason, rows=rows)
                continue
            Record(identity, BROKEN, "it began, and left no result").write(path)
            run(part, min(left, PATIENCE * part.seconds))
            record = read(path)
        yield part, record or Record(identity)


def run_in_process(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Run:
    """Return a function that runs *command* with `--part NAME`; its output goes to NAME.log in *folder*."""

    def run(part: Part, limit: float) -> None:
        path, began = folder / f"{part.name}.json", time.monotonic()
        with (folder / f"{part.name}.log").open("wb") as log:
            try:
                status = subprocess.run(
                    [*command, "--part", part.name],
                    stdout=log,
                    stderr=log,
                    timeout=limit,
                    env=dict(environment),
                    check=False,
                ).returncode
                ending = None if status == 0 else (BROKEN, f"its process ended with status {status}; see {log.name}")
            except subprocess.TimeoutExpired:
                ending = (LATE, f"it was ended after {limit:.0f} s; see {log.name}")
        record = read(path)
        if record is not None and ending is not None:
            record.outcome, record.reason = ending
        if record is not None:
            record.seconds = time.monotonic() - began
            record.write(path)

    return run

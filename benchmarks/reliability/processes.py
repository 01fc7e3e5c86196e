"""What a running `saccade serve` holds: memory, descriptors, shared memory; and where a figure was measured."""

import contextlib
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from collector import collecting
from faults import roles, segments
from server import Server

from benchmarks.measured import MIB, commit, machine
from benchmarks.reliability.memory import memory


@dataclass(frozen=True)
class Holdings:
    """At *seconds* after the start, by role, all processes of a role together: memory and descriptors.

    *own_mib* is the memory without pages of files, *pss_mib* the proportional set size.
    """

    seconds: float
    own_mib: dict[str, float]
    pss_mib: dict[str, float]
    descriptors: dict[str, int]
    shared_mib: float


def holdings(server: Server, seconds: float) -> Holdings:
    """Look at all processes of *server*."""
    own: dict[str, float] = {}
    pss: dict[str, float] = {}
    descriptors: dict[str, int] = {}
    for role, processes in roles(server).items():
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess, OSError):
                usage = memory(process.pid)
                own[role] = own.get(role, 0.0) + usage.own
                pss[role] = pss.get(role, 0.0) + usage.pss
                descriptors[role] = descriptors.get(role, 0) + process.num_fds()
    return Holdings(seconds, own, pss, descriptors, _shared_bytes(server) / MIB)


def _shared_bytes(server: Server) -> int:
    ours = {str(process.pid) for process in server.tree()}
    return sum(Path("/dev/shm", name).stat().st_size for name in segments(server) if name.split("-")[1] in ours)


@dataclass
class Traces:
    """The *flags* of a server that sends traces, and the number of spans that came, once the block has ended."""

    flags: tuple[str, ...] = ()
    num_spans: int = 0

    def violations(self) -> list[str]:
        """Return what must not be, in words."""
        return ["no span came to the collector"] if self.flags and not self.num_spans else []

    def report(self) -> list[str]:
        """Return a line of Markdown, if there were traces."""
        return [f"- traces: {self.num_spans} spans came to a collector"] if self.flags else []


@contextlib.contextmanager
def traces(sample: float | None) -> Iterator[Traces]:
    """Collect the traces of the part *sample* of the requests while the block runs; none if it is None."""
    if sample is None:
        yield Traces()
        return
    with collecting() as collector:
        found = Traces(("--otlp-traces-endpoint", collector.endpoint, "--trace-sample", str(sample)))
        yield found
        found.num_spans = collector.num_spans


def provenance() -> list[str]:
    """Return machine, commit and command as lines of Markdown."""
    return [
        f"- machine: {machine()}; torch {torch.__version__}, Python {platform.python_version()}",
        f"- commit: {commit()}",
        f"- command: `python -m benchmarks.reliability.{Path(sys.argv[0]).stem} {' '.join(sys.argv[1:])}`",
    ]

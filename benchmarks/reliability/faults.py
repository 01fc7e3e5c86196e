"""Strike every fault at a real server, measure what users see and how long, and write the table of docs/reliability.md.

    python -m benchmarks.reliability.faults [--repeats 3] [--out benchmarks/results/faults.md]

The bundled model. Each fault comes while four requests run, two of them streamed; then the same short request is sent
again and again until it is answered. An answer that differs from the quiet server's ends the program with an error.
"""

import argparse
import functools
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import faults
from faults import Observation, Quiet
from server import Server, serving

from benchmarks.measured import ROOT, end_with_what_was_started
from benchmarks.reliability.processes import provenance

SILENCE_SECONDS = 15
PAUSE_SECONDS = 10.0
FLAGS = (
    *faults.FLAGS,
    "--kv-cache-memory-bytes",
    str(faults.NUM_BLOCKS * 65536),
    "--engine-silence",
    str(SILENCE_SECONDS),
)
FULL = f"/dev/shm full (a tmpfs of {faults.FULL_BYTES >> 10} KiB)"
FAULTS: dict[str, Callable[[Server, Quiet], None]] = {
    **faults.FAULTS,
    f"SIGSTOP engine, SIGCONT after {PAUSE_SECONDS:.0f} s": functools.partial(faults.pause, PAUSE_SECONDS),
    f"SIGSTOP engine for good (`--engine-silence {SILENCE_SECONDS}`)": faults.hang,
}
BEGIN, END = "<!-- figures -->\n", "<!-- end of figures -->"
HEAD = (
    "| fault | the four running requests | requests sent after it | right answers again after | left behind |",
    "|---|---|---|---|---|",
)


@dataclass
class Row:
    """What came of one fault, over all repeats."""

    running: Counter[str] = field(default_factory=Counter)
    later: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def add(self, seen: Observation) -> None:
        """Take one more observation in."""
        self.running += seen.running
        self.later += seen.later
        self.seconds.append(seen.seconds)
        self.left += seen.left

    def line(self, name: str) -> str:
        """Return the row of the table."""
        later = Counter({what: count for what, count in self.later.items() if what != faults.RIGHT})
        seconds = f"{statistics.median(self.seconds):.1f} s (at most {max(self.seconds):.1f} s)"
        then = f"{_words(later)}, then right answers" if later else "right answers"
        return f"| {name} | {_words(self.running)} | {then} | {seconds} | {'; '.join(self.left) or 'nothing'} |"


def _words(counter: Counter[str]) -> str:
    return ", ".join(f"{count} x {what}" for what, count in counter.most_common())


def measure(repeats: int) -> dict[str, Row]:
    """Strike each fault *repeats* times."""
    rows: dict[str, Row] = {}
    with serving(*FLAGS) as server:
        quiet = Quiet(server)
        quiet.learn(*faults.MANY_IMAGES)
        for name, harm in FAULTS.items():
            row = rows[name] = Row()
            for _ in range(repeats):
                row.add(faults.strike(server, quiet, harm))
            print(row.line(name), file=sys.stderr, flush=True)
    with serving(*FLAGS, before=faults.IN_SMALL_SHARED_MEMORY) as server:
        row = rows[FULL] = Row()
        for _ in range(repeats):
            row.add(faults.strike(server, quiet.of(server), faults.fill))
    return rows


def main() -> None:
    """Measure, and write the results and the table of the documentation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/faults.md")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/reliability.md")
    arguments = parser.parse_args()
    end_with_what_was_started()
    table = [*HEAD, *(row.line(name) for name, row in measure(arguments.repeats).items())]
    server = ["- server:", f"  `saccade serve {' '.join(FLAGS)}`,", f"  {arguments.repeats} times each fault"]
    where = [*provenance(), *server]
    arguments.out.write_text("\n".join(["# Faults", "", *where, "", *table]) + "\n")
    page = arguments.page.read_text()
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    arguments.page.write_text(before + BEGIN + "\n".join(["", *where, "", *table, "", ""]) + END + after)


if __name__ == "__main__":
    main()

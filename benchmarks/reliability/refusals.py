"""Time to refuse: requests that cannot be served, alone and beside clients with images.

    python -m benchmarks.reliability.refusals [--clients 32] [--minutes 1] [--out benchmarks/results/refusals.md]

The bundled model on loopback. The clients ask about a fresh image each, wait for the answer, and pause for a second
on average. Beside them a 388 KB PNG of 20000 x 20000, 100 images, an unknown model and a wrong key are sent in turn.
"""

import argparse
import asyncio
import sys
from pathlib import Path

from server import serving

from benchmarks.measured import ROOT, end_with_what_was_started
from benchmarks.reliability.processes import provenance
from benchmarks.reliability.siege_honest import Seen, honest
from benchmarks.reliability.siege_report import MOST_REFUSAL_SECONDS, percentile

KEYS = ("one", "two")
WARM_UP_SECONDS = 5.0


def main() -> int:
    """Run, write the report, return the exit status: 1 where a request got another answer than expected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/refusals.md")
    arguments = parser.parse_args()
    end_with_what_was_started()
    named = [word for key in KEYS for word in ("--api-key", key)]
    with serving(*named, key=KEYS[0]) as server:
        alone = honest(server, KEYS, {}, has_probes=True)
        busy = honest(server, KEYS, {"images": arguments.clients}, has_probes=True)
        asyncio.run(busy.run(WARM_UP_SECONDS))
        seen = [asyncio.run(load.run(60 * arguments.minutes)) for load in (alone, busy)]
    text = "\n".join(["# Time to refuse", "", *provenance(), "", *report(*seen, arguments.clients)]) + "\n"
    arguments.out.write_text(text)
    print(text)
    return 1 if any(part.failures or part.not_as_expected for part in seen) else 0


def report(alone: Seen, busy: Seen, num_clients: int) -> list[str]:
    """Return the report's lines of Markdown."""
    columns = ("alone p50", "alone p99", f"beside {num_clients} p50", f"beside {num_clients} p99")
    goal = f"< {1000 * MOST_REFUSAL_SECONDS:.0f} ms"
    lines = [f"| refused, ms | {' | '.join(columns)} | p99 {goal} |", "|---|---|---|---|---|---|"]
    for name, seconds in busy.refused.items():
        figures = [percentile(values, part) for values in (alone.refused[name], seconds) for part in (0.5, 0.99)]
        holds = "yes" if figures[-1] < MOST_REFUSAL_SECONDS else "NO"
        lines.append(f"| {name} | {' | '.join(f'{1000 * value:.1f}' for value in figures)} | {holds} |")
    wrong = alone.failures + busy.failures + alone.not_as_expected + busy.not_as_expected
    return [
        *lines,
        "",
        f"{busy.num_answers} answers about images; requests with another end than expected: {wrong.total()}.",
    ]


if __name__ == "__main__":
    sys.exit(main())

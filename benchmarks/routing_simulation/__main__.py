"""Weights of the routing cost over simulated fleets: `python -m benchmarks.routing_simulation [--out FILE]`.

Router, index, predictions and look-up are the gateway's own classes; workers are simulated, with steps, chunked prefill
and block caches, and so is time. A figure is the worst of the seeds.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measured import commit
from benchmarks.routing_simulation.fleet import Simulation
from benchmarks.routing_simulation.traffic import KINDS, Traffic
from benchmarks.routing_simulation.worker import SimulatedSequence
from saccade.fleet.cost import RECOMPUTE_WEIGHT, Policy

WEIGHTS = (1.0, 1.25, 1.5, 2.0, 3.0)
SEEDS = (1, 2, 3)


@dataclass(frozen=True)
class Figures:
    """*cached* is the part of all prompt tokens that workers held; times to the first token in milliseconds."""

    cached: float
    mean_ms: float
    p99_ms: float

    def __str__(self) -> str:
        return f"{self.cached:.3f} / {self.mean_ms:.0f} / {self.p99_ms:.0f}"


def measure(traffic: Traffic, policy: Policy, weight: float, seed: int) -> Figures:
    """Simulate *traffic* once."""
    return _figures(Simulation(traffic.fleet, policy, weight, seed).run(traffic.arrivals(seed)))


def _figures(finished: Sequence[SimulatedSequence]) -> Figures:
    waits = sorted(1000 * (each.first_token_at - each.arrived_at) for each in finished)
    cached = sum(each.num_cached for each in finished) / sum(each.prompt.num_tokens for each in finished)
    return Figures(cached, statistics.mean(waits), waits[len(waits) * 99 // 100])


def _worst(each: Sequence[Figures]) -> Figures:
    return Figures(min(one.cached for one in each), max(one.mean_ms for one in each), max(one.p99_ms for one in each))


def table(kinds: Sequence[str], seeds: Sequence[int]) -> Iterator[str]:
    """Yield the lines of the table, one for each kind of traffic."""
    yield f"| traffic | round robin | {' | '.join(f'weight {weight:g}' for weight in WEIGHTS)} | 1.5 against the best |"
    yield "|---" * (len(WEIGHTS) + 3) + "|"
    for kind in kinds:
        traffic = KINDS[kind]
        turns = _worst([measure(traffic, "round_robin", RECOMPUTE_WEIGHT, seed) for seed in seeds])
        runs = {weight: [measure(traffic, "cost", weight, seed) for seed in seeds] for weight in WEIGHTS}
        best = [min(runs[weight][place].mean_ms for weight in WEIGHTS) for place in range(len(seeds))]
        chosen = runs[RECOMPUTE_WEIGHT]
        ratio = max(one.mean_ms / least for one, least in zip(chosen, best, strict=True))
        figures = " | ".join(str(_worst(runs[weight])) for weight in WEIGHTS)
        yield f"| {kind} | {turns} | {figures} | {ratio:.2f} |"


def main() -> None:
    """Print the table, and write the page of results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--out", type=Path, help="a page for the table, which is printed anyway")
    chosen = parser.parse_args()
    lines = []
    for line in table(chosen.kinds, chosen.seeds):
        print(line, flush=True)
        lines.append(line)
    if chosen.out is not None:
        chosen.out.write_text(PAGE.format(commit=commit(), seeds=len(chosen.seeds), table="\n".join(lines)))


PAGE = """# What weighs how much when a worker is chosen

- commit: {commit}; time is simulated, so the machine does not matter
- command: `python -m benchmarks.routing_simulation --out benchmarks/results/routing-simulation.md`

Part of the prompt tokens that workers held / mean / 99th percentile of the time to the first token in ms. Each figure
is the worst of {seeds} seeds. The weight is `--routing-recompute-weight`. The last column divides the mean with 1.5 by
that of the best weight for the same seed, and is the worst of the seeds.

{table}
"""


if __name__ == "__main__":
    main()

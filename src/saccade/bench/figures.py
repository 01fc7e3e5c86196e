"""Computes runs' figures, and intervals for the ratios of two servers' figures. This module measures nothing."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from saccade.bench.client import Record
from saccade.bench.load import Run

Floats = NDArray[np.float64]
LATENCIES = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2el": "end to end"}
PERCENTILES = (50, 90, 99)
STATISTICS = ("mean", "p50", "p90", "p99")
RATES = {"requests_per_second": "requests/s", "tokens_per_second": "output tokens/s", "goodput": "goodput, requests/s"}
NUM_RESAMPLES = 500
TTFT, TPOT, E2EL, TOKENS, IS_GOOD = range(5)


class Ratio(msgspec.Struct, frozen=True):
    """B's figure over A's, and its 95 % interval."""

    ratio: float
    low: float
    high: float

    @property
    def is_distinguishable(self) -> bool:
        """Whether the interval excludes 1."""
        return not self.low <= 1.0 <= self.high


class Answers(NamedTuple):
    """A run's answers without errors.

    *table* is [answers, TTFT .. IS_GOOD], and *gaps* are those between each answer's texts. Times are in ms.
    """

    table: Floats
    gaps: Sequence[Floats]
    wall_seconds: float

    def drawn(self, random: np.random.Generator) -> "Answers":
        """Return a resample with as many answers, drawn with replacement.

        Its run time scales with the answers' times.
        """
        rows = random.integers(0, max(1, len(self.table)), len(self.table)).tolist()
        table = self.table[rows]
        longer = table[:, E2EL].sum() / max(self.table[:, E2EL].sum(), 1e-9)
        return Answers(table, [self.gaps[row] for row in rows], self.wall_seconds * longer)


def answers(run: Run, limits: Mapping[str, float]) -> Answers:
    """Return the answers of *run* without errors. An answer is good if it stays within all *limits*, in ms."""
    good = [record for record in run.records if record.error is None]
    rows = [(record.text_ms[0], tpot(record), record.end_ms, record.completion_tokens, 1.0) for record in good]
    table = np.array(rows, float).reshape(-1, IS_GOOD + 1)
    for name, limit in limits.items():
        table[table[:, {"ttft": TTFT, "tpot": TPOT, "e2el": E2EL}[name]] > limit, IS_GOOD] = 0.0
    return Answers(table, [np.diff(record.text_ms) for record in good], run.wall_seconds)


def tpot(record: Record) -> float:
    """Return the mean time in ms per token after the first, as `vllm bench` computes it; NaN for one token."""
    count = record.completion_tokens - 1
    return (record.last_ms - record.text_ms[0]) / count if count > 0 else float("nan")


def times(parts: Sequence[Answers]) -> dict[str, Floats]:
    """Return all values, in ms, for each of LATENCIES."""
    table = np.concatenate([one.table for one in parts])
    gaps = np.concatenate([np.empty(0), *(gap for one in parts for gap in one.gaps)])
    between = table[:, TPOT]
    return {"ttft": table[:, TTFT], "itl": gaps, "tpot": between[~np.isnan(between)], "e2el": table[:, E2EL]}


def figures(parts: Sequence[Answers]) -> dict[str, float]:
    """Return statistics such as `ttft_p50`, in ms, and RATES. Those without a value are absent."""
    result: dict[str, float] = {}
    for name, numbers in times(parts).items():
        if len(numbers):
            statistics = (numbers.mean(), *np.percentile(numbers, PERCENTILES))
            result |= {f"{name}_{part}": float(one) for part, one in zip(STATISTICS, statistics, strict=True)}
    table, wall = np.concatenate([one.table for one in parts]), sum(one.wall_seconds for one in parts)
    totals = len(table), table[:, TOKENS].sum(), table[:, IS_GOOD].sum()
    return result | {name: float(total / wall) for name, total in zip(RATES, totals, strict=True) if wall}


def ratios(a: Sequence[Answers], b: Sequence[Answers], seed: int = 0) -> dict[str, Ratio]:
    """Return B's figures over A's with bootstrap intervals; the runs of *a* and *b* alternated.

    A resample first draws alternations, the same ones for both, then answers in each run. So an interval includes what
    changed from alternation to alternation. A figure that is absent or 0 has no ratio.
    """
    random, samples = np.random.default_rng(seed), []
    for _ in range(NUM_RESAMPLES):
        rounds = random.integers(0, len(a), len(a))
        samples.append([figures([side[index].drawn(random) for index in rounds]) for side in (a, b)])
    of_a, of_b = figures(a), figures(b)
    result = {}
    for name in of_a:
        quotients = [two[name] / one[name] for one, two in samples if one.get(name) and name in two]
        if of_a[name] and of_b.get(name) and quotients:
            low, high = np.percentile(quotients, (2.5, 97.5))
            result[name] = Ratio(of_b[name] / of_a[name], float(low), float(high))
    return result

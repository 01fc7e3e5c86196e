"""What a siege must show, and how it is written down."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.reliability.siege_attacks import ATTACKS
from benchmarks.reliability.siege_honest import Seen
from benchmarks.reliability.siege_watch import PRIVATE, TREE

MOST_RATIO, MOST_RATIO_OF_ONE = 2.0, 1.2
"""p99 of honest clients against the quiet run: beside all attacks, and beside one."""

MOST_REFUSAL_SECONDS = 0.05
MEMORY_MARGIN = 1.2


@dataclass
class Phase:
    """All that was seen in the phases of one kind: by honest clients; peaks in MiB; cores in use by role."""

    seen: Seen = field(default_factory=Seen)
    peaks: dict[str, float] = field(default_factory=dict)
    cores: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass
class Siege:
    """Both kinds of phases, what the attackers saw, and what was left behind.

    *bodies_alone* are peaks in MiB before and while attackers send bodies to a server that has no other client.
    """

    bodies_alone: tuple[Mapping[str, float], Mapping[str, float]] | None = None
    quiet: Phase = field(default_factory=Phase)
    besieged: Phase = field(default_factory=Phase)
    attackers: list[dict[str, Any]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Verdict:
    """One goal: what was measured, what it must be. Only a goal about correctness *is_strict*."""

    goal: str
    measured: str
    wanted: str
    holds: bool
    is_strict: bool = True

    @property
    def fails(self) -> bool:
        """Whether the program fails for it."""
        return self.is_strict and not self.holds

    def line(self) -> str:
        """Return the row of the table."""
        return f"| {self.goal} | {self.measured} | {self.wanted} | {'yes' if self.holds else 'NO'} |"


def percentile(values: Sequence[float], part: float) -> float:
    """Return the least of *values* that *part* of them do not pass; not a number where there are none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)] if ordered else math.nan


def verdicts(siege: Siege, budgets_mib: Mapping[str, float], is_of_one: bool) -> list[Verdict]:
    """Return all goals; *budgets_mib* are the stated ones, empty where the server states none."""
    found = [*_times(siege, MOST_RATIO_OF_ONE if is_of_one else MOST_RATIO)]
    for name, phase in (("quiet", siege.quiet), ("besieged", siege.besieged)):
        found.append(_none(f"honest requests refused or failed, {name}", phase.seen.failures))
        found.append(_none(f"refusals that were not the expected ones, {name}", phase.seen.not_as_expected))
    for name, seconds in siege.besieged.seen.refused.items():
        slowest = percentile(seconds, 0.99)
        wanted = f"< {1000 * MOST_REFUSAL_SECONDS:.0f} ms"
        holds = slowest < MOST_REFUSAL_SECONDS
        found.append(Verdict(f"p99 to refuse: {name}", f"{1000 * slowest:.0f} ms", wanted, holds, is_strict=False))
    for name in (PRIVATE, TREE):
        found.append(_memory(name, siege.quiet.peaks, siege.besieged.peaks, budgets_mib))
        if siege.bodies_alone is not None:
            found.append(_memory(f"{name}, bodies alone", *siege.bodies_alone, budgets_mib))
    found.append(_none("left behind", Counter(siege.left)))
    crashed = Counter(error for one in siege.attackers for error in one["failed"])
    return [*found, _none("attackers that failed by themselves", crashed)]


def _times(siege: Siege, most: float) -> list[Verdict]:
    found = []
    for what in ("first", "whole"):
        quiet, besieged = getattr(siege.quiet.seen, what), getattr(siege.besieged.seen, what)
        for kind in quiet:
            before, after = percentile(quiet[kind], 0.99), percentile(besieged.get(kind, ()), 0.99)
            words = "first token" if what == "first" else "whole answer"
            measured = "no answers" if math.isnan(after) else f"{after / before:.2f} x"
            holds = after <= most * before
            found.append(Verdict(f"p99, {words}, {kind}", measured, f"<= {most:g} x", holds, is_strict=False))
    return found


def _none(goal: str, counted: Counter[str]) -> Verdict:
    words = "; ".join(f"{count} x {what}" if count > 1 else what for what, count in counted.most_common())
    return Verdict(goal, words or "none", "none", not counted)


def _memory(
    what: str, before: Mapping[str, float], after: Mapping[str, float], budgets_mib: Mapping[str, float]
) -> Verdict:
    name, _, _ = what.partition(", bodies alone")
    grown, budget = after[name] - before[name], budgets_mib.get(name)
    if budget is None:
        return Verdict(f"peak memory over quiet, {what}", f"{grown:.0f} MiB", "no budget stated", True)
    wanted = f"<= {MEMORY_MARGIN:g} x {budget:.0f} MiB"
    return Verdict(f"peak memory over quiet, {what}", f"{grown:.0f} MiB", wanted, grown <= MEMORY_MARGIN * budget)


def report(siege: Siege, verdicts: Sequence[Verdict]) -> list[str]:
    """Return the report's lines of Markdown."""
    phases = {"quiet": siege.quiet, "besieged": siege.besieged}
    counts = [f"{phase.seen.num_answers} answers in {phase.seconds:.0f} s {name}" for name, phase in phases.items()]
    lines = [f"Honest clients: {'; '.join(counts)}.", "", "| goal | measured | wanted | holds |", "|---|---|---|---|"]
    lines += [verdict.line() for verdict in verdicts]
    lines += [
        "",
        "| honest clients, ms | quiet p50 | quiet p99 | besieged p50 | besieged p99 | times p50 | times p99 |",
    ]
    lines += ["|---|---|---|---|---|---|---|"]
    for words, what in (("first token", "first"), ("whole answer", "whole"), ("refused", "refused")):
        quiet, besieged = getattr(siege.quiet.seen, what), getattr(siege.besieged.seen, what)
        lines += [_row(f"{words}: {kind}", quiet[kind], besieged.get(kind, ())) for kind in quiet]
    lines += ["", "| peak memory without pages of files, MiB | quiet | besieged |", "|---|---|---|"]
    for name in siege.quiet.peaks:
        lines.append(f"| {name} | {siege.quiet.peaks[name]:.0f} | {siege.besieged.peaks.get(name, math.nan):.0f} |")
    lines += ["", "| cores in use | quiet | besieged |", "|---|---|---|"]
    for name in siege.quiet.cores:
        before, after = siege.quiet.cores[name], siege.besieged.cores.get(name, math.nan)
        lines.append(f"| {name} | {before:.2f} | {after:.2f} |")
    return [*lines, "", *_attackers(siege.attackers)]


def _row(name: str, quiet: Sequence[float], besieged: Sequence[float]) -> str:
    pairs = [(percentile(quiet, part), percentile(besieged, part)) for part in (0.5, 0.99)]
    times = [f"{1000 * value:.0f}" for values in zip(*pairs, strict=True) for value in values]
    return f"| {name} | " + " | ".join([*times, *(f"{after / before:.2f}" for before, after in pairs)]) + " |"


def _attackers(seen: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = ["| attack | workers | what they saw (times; median and longest seconds) |", "|---|---|---|"]
    for name in seen[0]["attacks"] if seen else ():
        outcomes: dict[str, list[Mapping[str, float]]] = {}
        for one in seen:
            for outcome, summary in one["attacks"][name].items():
                outcomes.setdefault(outcome, []).append(summary)
        words = [_outcome(outcome, parts) for outcome, parts in outcomes.items()]
        lines.append(f"| {name} | {ATTACKS[name].workers} | {'; '.join(words)} |")
    fetches = [
        f"{path}: {count}, at most {most} at a time" for one in seen for path, (count, most) in one["fetches"].items()
    ]
    cores = ", ".join(f"{one['cores']:.2f}" for one in seen)
    return [
        *lines,
        "",
        f"Fetches that the hosts saw: {'; '.join(fetches) or 'none'}. Cores that the attackers used: {cores}.",
    ]


def _outcome(name: str, parts: Sequence[Mapping[str, float]]) -> str:
    count = sum(part["count"] for part in parts)
    middle, longest = statistics.median(part["median"] for part in parts), max(part["max"] for part in parts)
    return f"{count:.0f} x {name} ({middle:.1f}, {longest:.1f})"

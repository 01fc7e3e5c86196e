"""What a siege must show, and how it is written down."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.reliability.siege_attacks import ATTACKS
from benchmarks.reliability.siege_honest import Seen

MOST_LIVE_SECONDS = 0.05
"""p99 of /live over the control's."""

MOST_RATIO = 1.5
"""p95 of honest answers to text, and of first tokens of images, against the control's."""

MOST_REFUSAL_SECONDS = 0.05
"""p95 of honest refusals over the control's."""

MEMORY_MARGIN_MIB = 64
"""The gateway's own, over the budgets that an attack may fill."""

MOST_ROUND_MIB = 8
FIRST_ROUND = 2
"""From this round on, what everything at once leaves may not grow by more than MOST_ROUND_MIB."""

Attackers = Mapping[str, Mapping[str, Any]]
"""What the attackers saw, by attack: outcomes, how many requests were open at the end, and errors of their own."""


@dataclass(frozen=True)
class Observation:
    """What honest clients and attackers saw in one phase, and the gateway's memory at its peak, in MiB."""

    seen: Seen
    peak_mib: float
    attackers: Attackers


@dataclass(frozen=True)
class Row:
    """Pairs of a control and an attack; the gateway had *before_mib* before the first."""

    name: str
    before_mib: float
    pairs: Sequence[tuple[Observation, Observation]]

    def median(self, compare: Callable[[Seen, Seen], float]) -> float:
        """Return the median of what *compare* finds in the pairs."""
        return statistics.median(compare(control.seen, attack.seen) for control, attack in self.pairs)

    @property
    def grown_mib(self) -> float:
        """The gateway's memory at its peak, over that before."""
        return max(attack.peak_mib for _, attack in self.pairs) - self.before_mib


@dataclass(frozen=True)
class Closing:
    """Rounds of all attacks at once. The gateway had *before_mib* before the first and *kept_mib* after each.

    *left* says in words what was left after the last.
    """

    before_mib: float
    rounds: Sequence[Observation]
    kept_mib: Sequence[float]
    left: Sequence[str]

    @property
    def grown_mib(self) -> float:
        """The gateway's memory at its peak, over that before."""
        return max(phase.peak_mib for phase in self.rounds) - self.before_mib


@dataclass(frozen=True)
class Figure:
    """One figure of a row: *value* may be at most *most*."""

    text: str
    value: float
    most: float

    def cell(self) -> str:
        """Return the cell of the table; a missed figure stands out."""
        return self.text if self.value <= self.most else f"**{self.text}**"


def percentile(values: Sequence[float], part: float) -> float:
    """Return the least of *values* that *part* of them do not pass; not a number where there are none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)] if ordered else math.nan


def figures(row: Row, budgets_mib: Mapping[str, float]) -> list[Figure]:
    """Return what the columns of HEAD have: times against the control, and memory."""
    live = row.median(lambda control, attack: percentile(attack.live, 0.99) - percentile(control.live, 0.99))
    alone = row.median(lambda control, _: percentile(control.live, 0.99))
    text = row.median(lambda control, attack: _ratio(control.whole, attack.whole, "text"))
    images = row.median(lambda control, attack: _ratio(control.first, attack.first, "images"))
    refusal = row.median(lambda control, attack: _refusal(attack) - _refusal(control))
    most_mib = sum(budgets_mib[part] for part in ATTACKS[row.name].fills) + MEMORY_MARGIN_MIB
    return [
        Figure(f"{1000 * alone:.0f} {1000 * live:+.0f}", live, MOST_LIVE_SECONDS),
        Figure(f"{text:.2f}", text, MOST_RATIO),
        Figure(f"{images:.2f}", images, MOST_RATIO),
        Figure(f"{1000 * refusal:+.0f}", refusal, MOST_REFUSAL_SECONDS),
        Figure(f"{row.grown_mib:+.0f} of {most_mib:.0f}", row.grown_mib, most_mib),
    ]


HEAD = (
    "| attack | /live p99, ms: control, more | text p95, times | image's first token p95, times | refusal p95, ms more "
    "| memory, MiB | what the attackers saw (median and longest seconds) |"
)


def _ratio(control: Mapping[str, Sequence[float]], attack: Mapping[str, Sequence[float]], kind: str) -> float:
    return percentile(attack.get(kind, ()), 0.95) / percentile(control.get(kind, ()), 0.95)


def _refusal(seen: Seen) -> float:
    return percentile([seconds for each in seen.refused.values() for seconds in each], 0.95)


def line(row: Row, budgets_mib: Mapping[str, float]) -> str:
    """Return the row of the table."""
    cells = [figure.cell() for figure in figures(row, budgets_mib)]
    return f"| {row.name} | {' | '.join([*cells, _outcomes(row)])} |"


def _outcomes(row: Row) -> str:
    seconds: dict[str, list[Mapping[str, float]]] = {}
    for _, attack in row.pairs:
        for outcome, summary in attack.attackers[row.name]["outcomes"].items():
            seconds.setdefault(outcome, []).append(summary)
    return "; ".join(
        f"{sum(part['count'] for part in parts):.0f} x {outcome} "
        f"({statistics.median(part['median'] for part in parts):.1f}, {max(part['max'] for part in parts):.1f})"
        for outcome, parts in seconds.items()
    )


BUSY = "429 queue_full"
"""In the closing row no fault: the attackers' many addresses have all connections between them."""


def faults(rows: Sequence[Row], closing: Closing | None, budgets_mib: Mapping[str, float]) -> list[str]:
    """Return in words what must not be, whatever the machine."""
    found = [fault for row in rows for fault in _faults(row, budgets_mib)]
    if closing is None:
        return found
    later = closing.kept_mib[FIRST_ROUND:]
    grown = (later[-1] - later[0]) / (len(later) - 1)
    if grown > MOST_ROUND_MIB:
        found.append(f"all at once: {grown:.0f} MiB more are kept in each round; {MOST_ROUND_MIB} may be")
    if closing.grown_mib > (most := sum(budgets_mib.values()) + MEMORY_MARGIN_MIB):
        found.append(f"all at once: memory {closing.grown_mib:+.0f} of {most:.0f} MiB")
    found += [f"all at once: {count} x {what}" for what, count in _failures(closing).items() if BUSY not in what]
    return [*found, *(f"all at once left: {what}" for what in closing.left)]


def _failures(closing: Closing) -> Counter[str]:
    """Return what honest requests got instead of their answers."""
    return sum((phase.seen.failures + phase.seen.not_as_expected for phase in closing.rounds), Counter[str]())


def _faults(row: Row, budgets_mib: Mapping[str, float]) -> list[str]:
    counted: Counter[str] = Counter()
    for phase in (phase for pair in row.pairs for phase in pair):
        counted += phase.seen.failures + phase.seen.not_as_expected
        counted += Counter(phase.attackers[row.name]["errors"])
    _, last = row.pairs[-1]
    if (num_open := last.attackers[row.name]["open"]) and not ATTACKS[row.name].holds:
        counted[f"{num_open} requests of the attack did not end"] = 1
    memory = figures(row, budgets_mib)[-1]
    if memory.value > memory.most:
        counted[f"memory {memory.text} MiB"] = 1
    return [f"{row.name}: {count} x {what}" if count > 1 else f"{row.name}: {what}" for what, count in counted.items()]


def report(
    rows: Sequence[Row],
    closing: Closing | None,
    faults: Sequence[str],
    budgets_mib: Mapping[str, float],
    more: Sequence[str] = (),
) -> list[str]:
    """Return the report's lines of Markdown, *more* after its table."""
    goals = (
        f"Goals: /live at most {1000 * MOST_LIVE_SECONDS:.0f} ms more than beside the control; text and images at most "
        f"{MOST_RATIO:g} times; refusals at most {1000 * MOST_REFUSAL_SECONDS:.0f} ms more; memory at most the budgets "
        f"that the attack may fill and {MEMORY_MARGIN_MIB} MiB. Times are medians of three pairs, memory is the most. "
        "What misses its goal is bold."
    )
    num_answers = sum(phase.seen.num_answers for row in rows for pair in row.pairs for phase in pair)
    lines = [f"{num_answers} answers of honest clients. {goals}", "", HEAD, "|" + "---|" * HEAD.count(" |")]
    lines += [line(row, budgets_mib) for row in rows]
    if closing is not None:
        kept = ", ".join(f"{mib:.0f}" for mib in closing.kept_mib)
        num_answers = sum(phase.seen.num_answers for phase in closing.rounds)
        num_busy = sum(count for what, count in _failures(closing).items() if BUSY in what)
        num_attacks = sum(not attack.is_by_worker for attack in ATTACKS.values())
        rounds = (
            f"All attacks at once, {len(closing.rounds)} rounds of 5 s with 10 s of rest: {num_answers} answers, and "
            f"{num_busy} honest requests were told to come back ({BUSY}), since {num_attacks} addresses share "
            "the connections."
        )
        lines += ["", f"{rounds} Memory grew by {closing.grown_mib:.0f} MiB; after the rounds it was {kept} MiB."]
    return [*lines, "", *more, "", "Faults: " + ("; ".join(faults) or "none") + "."]

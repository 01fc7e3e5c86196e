"""Scores by category with their intervals, and the difference between two servers."""

import math
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version

import msgspec

from saccade.eval.ask import Scored, Side
from saccade.eval.settings import EvalSettings

Z = 1.96
"""Of a 95 % interval."""

ALL = "all"


class Rate(msgspec.Struct, frozen=True):
    """A mean and its 95 % interval, in percent or percentage points."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.1f} ({self.low:.1f} to {self.high:.1f})"


class Line(msgspec.Struct, frozen=True):
    """A category: its number of questions, the score of each server, and that of B minus that of A."""

    name: str
    num: int
    scores: Sequence[Rate | None]
    difference: Rate | None = None


class Report(msgspec.Struct, frozen=True):
    """What --json writes."""

    task: str
    servers: Sequence[Mapping[str, object]]
    settings: EvalSettings
    versions: Mapping[str, str]
    lines: Sequence[Line]
    notes: Sequence[str]
    answers: Sequence[Sequence[Scored]]


def score(means: Sequence[float]) -> Rate | None:
    """Return the mean of *means*, from 0 to 1, and Wilson's interval; None if there are none."""
    if not means:
        return None
    num, mean = len(means), sum(means) / len(means)
    middle = (mean + Z**2 / (2 * num)) / (1 + Z**2 / num)
    half = Z * math.sqrt(mean * (1 - mean) / num + Z**2 / (4 * num**2)) / (1 + Z**2 / num)
    return Rate(100 * mean, 100 * max(0.0, middle - half), 100 * min(1.0, middle + half))


def difference(pairs: Sequence[tuple[float, float]]) -> Rate | None:
    """Return the mean of the second less the first of *pairs*, and its interval; None for fewer than two."""
    if len(pairs) < 2:
        return None
    steps = [b - a for a, b in pairs]
    mean = sum(steps) / len(steps)
    half = Z * math.sqrt(sum((step - mean) ** 2 for step in steps) / (len(steps) - 1) / len(steps))
    return Rate(100 * mean, 100 * (mean - half), 100 * (mean + half))


def by_question(answers: Sequence[Scored]) -> dict[int, float]:
    """Return the mean score over the runs, by the number of the question; failed requests are left out."""
    scores: dict[int, list[float]] = {}
    for one in answers:
        if one.answer.error is None:
            scores.setdefault(one.answer.number, []).append(one.score)
    return {number: sum(values) / len(values) for number, values in scores.items()}


def lines(sides: Sequence[Sequence[Scored]]) -> list[Line]:
    """Return one line for each category, and one for all questions."""
    categories: dict[str, dict[int, None]] = {}
    for one in (one for side in sides for one in side):
        for name in one.categories:
            categories.setdefault(name, {})[one.answer.number] = None
        categories.setdefault(ALL, {})[one.answer.number] = None
    every, means = categories.pop(ALL, {}), [by_question(side) for side in sides]
    table = []
    for name, numbers in (categories | {ALL: every}).items():
        scores = [score([side[number] for number in numbers if number in side]) for side in means]
        both = [(means[0][number], means[-1][number]) for number in numbers if all(number in side for side in means)]
        table.append(Line(name, len(numbers), scores, difference(both) if len(sides) > 1 else None))
    return table


def _notes(label: str, side: Side, settings: EvalSettings) -> Iterator[str]:
    answers = side.answers
    if side.num_new:
        yield (
            f"{label}: {side.num_new} answers in {side.wall_seconds:.1f} s, {settings.concurrency} at a time: "
            f"{side.num_new / side.wall_seconds:.1f} a second"
        )
    if num_old := len(answers) - side.num_new:
        yield f"{label}: {num_old} answers are of an earlier run"
    if settings.runs > 1:
        runs = [[one.score for one in answers if one.answer.run == run] for run in range(settings.runs)]
        yield f"{label}: the runs have {', '.join(f'{100 * sum(run) / max(1, len(run)):.1f}' for run in runs)} %"
    if num_cut := sum(one.answer.finish_reason == "length" for one in answers):
        yield f"{label}: {num_cut} answers were cut off at the limit of tokens (--max-tokens)"
    failed = [one.answer for one in answers if one.answer.error is not None]
    for kind, count in Counter(one.error for one in failed).items():
        example = next(one.example for one in failed if one.error == kind)
        yield f"{label}: {count} x {kind}, not in the scores, such as: {example}. The same command asks them again"


def _agreement(a: Sequence[Scored], b: Sequence[Scored]) -> str:
    """Return a sentence about the answers that both servers gave."""
    others = {(one.answer.number, one.answer.run): one for one in b if one.answer.error is None}
    pairs = [(one, others.get((one.answer.number, one.answer.run))) for one in a if one.answer.error is None]
    both = [(one, other) for one, other in pairs if other is not None]
    same = sum(one.answer.text == other.answer.text for one, other in both)
    better, worse = (sum(sign * (one.score - other.score) > 0 for one, other in both) for sign in (1, -1))
    return f"Of {len(both)} answers {same} have the same text; A is better in {better}, B in {worse}"


def report(task: str, sides: Sequence[Side], settings: EvalSettings) -> Report:
    """Return the whole report."""
    notes = [note for label, side in zip("AB", sides, strict=False) for note in _notes(label, side, settings)]
    if len(sides) > 1:
        notes.append(_agreement(sides[0].answers, sides[1].answers))
    servers = [
        {"root": side.server.root, "model": side.server.model, "version": side.server.version}
        | {"num_new": side.num_new, "wall_seconds": side.wall_seconds}
        for side in sides
    ]
    versions = {"python": platform.python_version(), "saccade": version("saccade"), "pillow": version("pillow")}
    answers = [side.answers for side in sides]
    return Report(task, servers, settings, versions, lines(answers), notes, answers)

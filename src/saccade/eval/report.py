"""Computes scores by category with their intervals, and the difference between two servers."""

import math
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version

import msgspec

from saccade.eval.ask import ScoredAnswer, Side
from saccade.eval.settings import EvalSettings
from saccade.release import installed_version

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
    """A category: its number of questions, each server's score, and B's score minus A's."""

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
    answers: Sequence[Sequence[ScoredAnswer]]


def score(means: Sequence[float]) -> Rate | None:
    """Return the mean of *means*, from 0 to 1, and Wilson's interval; None if there are none."""
    if not means:
        return None
    num, mean = len(means), sum(means) / len(means)
    middle = (mean + Z**2 / (2 * num)) / (1 + Z**2 / num)
    half = Z * math.sqrt(mean * (1 - mean) / num + Z**2 / (4 * num**2)) / (1 + Z**2 / num)
    return Rate(100 * mean, 100 * max(0.0, middle - half), 100 * min(1.0, middle + half))


def difference(pairs: Sequence[tuple[float, float]]) -> Rate | None:
    """Return the mean of second minus first in *pairs*, and its interval; None for fewer than two pairs."""
    if len(pairs) < 2:
        return None
    steps = [b - a for a, b in pairs]
    mean = sum(steps) / len(steps)
    half = Z * math.sqrt(sum((step - mean) ** 2 for step in steps) / (len(steps) - 1) / len(steps))
    return Rate(100 * mean, 100 * (mean - half), 100 * (mean + half))


def lines(sides: Sequence[Sequence[ScoredAnswer]]) -> list[Line]:
    """Return one line for each category, and one for all questions. Failed requests are not scored."""
    categories: dict[str, dict[int, None]] = {}
    scores: list[dict[int, list[float]]] = [{} for _ in sides]
    for side, answers in enumerate(sides):
        for one in answers:
            for name in (*one.categories, ALL):
                categories.setdefault(name, {})[one.number] = None
            if one.error is None:
                scores[side].setdefault(one.number, []).append(one.score)
    every = categories.pop(ALL, {})
    means = [{number: sum(runs) / len(runs) for number, runs in side.items()} for side in scores]
    table = []
    for name, numbers in (categories | {ALL: every}).items():
        rates = [score([side[number] for number in numbers if number in side]) for side in means]
        both = [(means[0][number], means[-1][number]) for number in numbers if all(number in side for side in means)]
        table.append(Line(name, len(numbers), rates, difference(both) if len(sides) > 1 else None))
    return table


def _notes(label: str, side: Side, settings: EvalSettings) -> Iterator[str]:
    answers = [one for one in side.answers if one.error is None]
    if side.num_new:
        speed = f"{side.wall_seconds:.1f} s, {side.num_new / side.wall_seconds:.1f} a second"
        yield f"{label}: {side.num_new} requests, {settings.concurrency} at a time: {speed}"
    if num_old := len(side.answers) - side.num_new:
        yield f"{label}: {num_old} answers are of an earlier run"
    if answers:
        yield f"{label}: {sum(one.completion_tokens for one in answers) / len(answers):.1f} tokens in an answer, mean"
    if settings.runs > 1:
        rates = [score([one.score for one in answers if one.run == run]) for run in range(settings.runs)]
        yield f"{label}: the runs have {', '.join(f'{rate.mean:.1f}' for rate in rates if rate)} %"
    if num_cut := sum(one.finish_reason == "length" for one in answers):
        yield f"{label}: {num_cut} answers were cut off at the limit of tokens (--max-tokens)"
    failed = [one for one in side.answers if one.error is not None]
    for kind, count in Counter(one.error for one in failed).items():
        example = next(one.example for one in failed if one.error == kind)
        yield f"{label}: {count} x {kind}, not in the scores, such as: {example}. The same command asks them again"


def _agreement(a: Sequence[ScoredAnswer], b: Sequence[ScoredAnswer]) -> str:
    """Return a sentence about the questions that both servers answered."""
    others = {(one.number, one.run): one for one in b if one.error is None}
    pairs = [(one, others[one.number, one.run]) for one in a if one.error is None and (one.number, one.run) in others]
    same = sum(one.text == other.text for one, other in pairs)
    better, worse = (sum(sign * (one.score - other.score) > 0 for one, other in pairs) for sign in (1, -1))
    return f"Of {len(pairs)} answers {same} have the same text; A is better in {better}, B in {worse}"


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
    versions = {"python": platform.python_version(), "saccade": installed_version(), "pillow": version("pillow")}
    answers = [side.answers for side in sides]
    return Report(task, servers, settings, versions, lines(answers), notes, answers)

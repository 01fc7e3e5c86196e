"""The table that `make conformance` prints: for each release, which aspects were compared with its reference.

A test names what it compares by `@pytest.mark.aspect("logits")`; the release is its parameter `name` or
`checkpoint_name`, or `release` where both mean something else. A whole run that leaves a cell empty without a reason in
HOLES fails.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

ASPECTS = ("layout", "ids", "patches", "logits", "cache", "chunks", "TP", "formats", "drafts")
"""What is compared with the release's reference. Two aspects have another one: formats holds logits with quantised
weights to those of the values that the weights stand for, and drafts holds answers with proposed tokens to those without."""

Cell = tuple[str, str]
"""A release and an aspect."""

HOLES: Mapping[Cell, str] = MappingProxyType(
    {("kimi_k3", aspect): "Saccade's engine does not run it." for aspect in ASPECTS[3:]}
)
"""Why a cell is empty, by (release, aspect)."""

MARK, OMITTED = "conformance", "omitted"
"""The properties of a report: what a test compares, and how many tests of the same a sample left out."""


class Count(NamedTuple):
    """How many comparisons of a cell passed and failed, and how many the sample left out."""

    passed: int = 0
    failed: int = 0
    omitted: int = 0


@pytest.fixture(autouse=True)
def aspect(request: pytest.FixtureRequest, record_property: Any) -> None:
    """Note what a test compares, for the table."""
    for mark in request.node.iter_markers("aspect"):
        record_property(MARK, f"{release_of(request.node.callspec.params)}/{mark.args[0]}")


def release_of(params: Mapping[str, Any]) -> Any:
    """Return the release that a test with these parameters is about."""
    return next(params[key] for key in ("release", "checkpoint_name", "name") if key in params)


def counted(stats: Mapping[str, Sequence[Any]]) -> Mapping[Cell, Count]:
    """Count comparisons in pytest's reports, which *stats* has by outcome. A test without a result is a failed one."""
    found: dict[Cell, list[int]] = defaultdict(lambda: [0, 0, 0])
    for place, outcomes in enumerate((("passed",), ("failed", "error"))):
        for report in (one for outcome in outcomes for one in stats.get(outcome, ())):
            for key, value in getattr(report, "user_properties", ()):
                is_counted = bool(place) or report.when == "call"
                if key == MARK and is_counted:
                    release, _, aspect = value.rpartition("/")
                    found[release, aspect][place] += 1
                elif key == OMITTED and is_counted:
                    release, aspect, number = value.rsplit("/", 2)
                    found[release, aspect][2] += int(number)
    return {cell: Count(*numbers) for cell, numbers in found.items()}


def lines(counts: Mapping[Cell, Count], releases: Iterable[str], holes: Mapping[Cell, str] = HOLES) -> Iterator[str]:
    """Return the table's lines, one for each release, and then the reasons of its holes."""
    names = list(releases)
    width = max(len(name) for name in names)
    yield " ".join([" " * width, *(f"{aspect:>8}" for aspect in ASPECTS)])
    for name in names:
        cells = (_text(counts.get((name, aspect), Count()), (name, aspect) in holes) for aspect in ASPECTS)
        yield " ".join([f"{name:{width}}", *(f"{cell:>8}" for cell in cells)])
    for (name, aspect), reason in holes.items():
        yield f"{name}, {aspect}: {reason}"


def unexplained(counts: Mapping[Cell, Count], releases: Iterable[str], holes: Mapping[Cell, str] = HOLES) -> list[Cell]:
    """Return the cells that are empty without a reason."""
    cells = ((name, aspect) for name in releases for aspect in ASPECTS)
    return [cell for cell in cells if counts.get(cell, Count()) == Count() and cell not in holes]


def _text(count: Count, is_explained: bool) -> str:
    if count.failed:
        return f"{count.failed} FAIL"
    if count.passed:
        return f"{count.passed}/{count.passed + count.omitted}" if count.omitted else str(count.passed)
    return "none" if is_explained else "MISSING"


def is_whole(config: Any) -> bool:
    """Tell whether pytest was asked for all of the conformance suite, and for nothing but that."""
    option = config.option
    narrowed = (option.keyword, option.deselect, option.ignore, option.ignore_glob, option.collectonly)
    is_everywhere = config.args_source is not pytest.Config.ArgsSource.ARGS
    return option.markexpr == MARK and is_everywhere and not any(narrowed)


def print_table(terminalreporter: Any) -> None:
    """Print the table behind a run of the conformance suite or a part of it."""
    import checkpoints

    counts = counted(terminalreporter.stats)
    if counts and terminalreporter.config.option.markexpr == MARK:
        terminalreporter.section(MARK)
        for line in lines(counts, checkpoints.CHECKPOINTS):
            terminalreporter.write_line(line)
        if any(count.omitted for count in counts.values()):
            terminalreporter.write_line(
                f"9/50: a sample of 9 of 50, by CONFORMANCE_SEED={os.environ['CONFORMANCE_SEED']}; --every runs all."
            )


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: Any) -> None:
    """Fail a whole run that passed but left a cell empty without a reason."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or session.exitstatus != pytest.ExitCode.OK or not is_whole(session.config):
        return
    import checkpoints

    if unexplained(counted(reporter.stats), checkpoints.CHECKPOINTS):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED

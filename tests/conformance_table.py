"""The table that `make conformance` prints: for each release, which aspects were compared with its reference.

A test names what it compares by `@pytest.mark.aspect("logits")`; the release is its parameter `name` or
`checkpoint_name`, or `release` where both mean something else.
"""

from collections import defaultdict
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

ASPECTS = ("layout", "ids", "patches", "logits", "cache", "chunks", "TP", "formats")
HOLES: Mapping[tuple[str, str], str] = MappingProxyType({})
"""Why a cell is empty, by (release, aspect)."""


@pytest.fixture(autouse=True)
def aspect(request: pytest.FixtureRequest, record_property: Any) -> None:
    """Note what a test compares, for the table."""
    marks = list(request.node.iter_markers("aspect"))
    if not marks or not hasattr(request.node, "callspec"):
        return
    params: Mapping[str, Any] = request.node.callspec.params
    release = next((params[key] for key in ("release", "checkpoint_name", "name") if key in params), None)
    for mark in marks:
        record_property("conformance", f"{release}/{mark.args[0]}")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print one row for each release: how many comparisons passed and failed in each aspect."""
    import checkpoints

    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for place, outcome in enumerate(("passed", "failed")):
        for report in terminalreporter.stats.get(outcome, ()):
            for key, value in getattr(report, "user_properties", ()):
                if key == "conformance" and (outcome == "failed" or report.when == "call"):
                    counts[value][place] += 1
    if not counts or terminalreporter.config.option.markexpr != "conformance":
        return
    releases = list(checkpoints.CHECKPOINTS)
    width = max(len(release) for release in releases)
    terminalreporter.section("conformance")
    terminalreporter.write_line(" ".join([" " * width, *(f"{aspect:>8}" for aspect in ASPECTS)]))
    for release in releases:
        cells = (_cell(*counts[f"{release}/{aspect}"], HOLES.get((release, aspect))) for aspect in ASPECTS)
        terminalreporter.write_line(" ".join([f"{release:{width}}", *(f"{cell:>8}" for cell in cells)]))
    for (release, aspect), reason in HOLES.items():
        terminalreporter.write_line(f"{release}, {aspect}: {reason}")


def _cell(num_passed: int, num_failed: int, reason: str | None) -> str:
    if num_failed:
        return f"{num_failed} FAIL"
    if num_passed:
        return str(num_passed)
    return "none" if reason else "MISSING"

"""A plugin of pytest that writes what became of each test, and does not run those that a list names.

It runs in the environments of suites, and needs nothing but pytest. JUDGE_SKIPS names a file with the names of tests
that are not run, one a line as JSON; JUDGE_OUTCOMES one that gets a line of JSON for each outcome.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

OUTCOMES = Path(os.environ["JUDGE_OUTCOMES"])
SKIPS = frozenset(json.loads(line) for line in Path(os.environ["JUDGE_SKIPS"]).read_text().splitlines())
WHY_CHARACTERS = 2000


def _write(name: str, became: str, why: str) -> None:
    with OUTCOMES.open("a") as file:
        file.write(json.dumps({"name": name, "became": became, "why": why[-WHY_CHARACTERS:]}) + "\n")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is not run."""
    for item in items:
        if item.nodeid in SKIPS:
            item.add_marker(pytest.mark.skip(reason="is listed as not applicable"))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be read is a failure of that name."""
    if report.failed:
        _write(f"{report.nodeid}::(import)", "failed", str(report.longrepr))


class Recorder:
    """Keeps the worst outcome of a test's set-up, call and tear-down."""

    def __init__(self) -> None:
        self._worst: dict[str, tuple[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take a phase of a test; after its tear-down its outcome is written."""
        became = "failed" if report.failed else "skipped" if report.skipped else "passed"
        if self._worst.get(report.nodeid, ("passed", ""))[0] == "passed":
            self._worst[report.nodeid] = (became, str(report.longrepr or ""))
        if report.when == "teardown":
            _write(report.nodeid, *self._worst.pop(report.nodeid))


def pytest_configure(config: Any) -> None:
    """Register the recorder."""
    config.pluginmanager.register(Recorder(), "judge-recorder")

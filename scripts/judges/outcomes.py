"""What became of each test, and the list of what is known of them.

The list is a file of TOML per judge. A reason stands for the names below it, and every name is written out. It only
shrinks: a run that finds a listed failure passing fails until the name is removed, which `--shrink` does.
"""

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclass(frozen=True)
class Outcome:
    """A test's name, what became of it (passed, failed, skipped), and why."""

    name: str
    became: str
    why: str = ""


@dataclass(frozen=True)
class Reason:
    """Why some tests fail, or are not run; their names."""

    text: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Known:
    """What a judge's list says: how many tests pass at least, which fail, and which do not apply and are not run."""

    passed: int = 0
    failed: tuple[Reason, ...] = ()
    not_applicable: tuple[Reason, ...] = ()

    @property
    def failures(self) -> frozenset[str]:
        """The names of the tests that fail."""
        return _names(self.failed)

    @property
    def skips(self) -> frozenset[str]:
        """The names of the tests that are not run."""
        return _names(self.not_applicable)


def _names(reasons: Iterable[Reason]) -> frozenset[str]:
    return frozenset(name for reason in reasons for name in reason.names)


@dataclass(frozen=True)
class Comparison:
    """A run beside its list."""

    passed: int
    failed: int
    skipped: int
    new: tuple[Outcome, ...]
    """Failures, and tests that were not run, that the list does not name."""
    mended: tuple[str, ...]
    """Tests that pass, and are listed as failures or not applicable."""
    missing: tuple[str, ...]
    """Listed names that the suite does not have."""
    lost: int
    """How many fewer pass than the list says."""

    @property
    def holds(self) -> bool:
        """Whether the run is as the list says."""
        return not (self.new or self.mended or self.missing or self.lost)

    @property
    def is_smaller(self) -> bool:
        """Whether the list can be shorter."""
        return bool(self.mended or self.missing)


def compare(known: Known, outcomes: Iterable[Outcome]) -> Comparison:
    """Hold *outcomes* against what is known. Raises ValueError for a test that has two outcomes."""
    by_name: dict[str, Outcome] = {}
    for outcome in outcomes:
        if outcome.name in by_name:
            raise ValueError(f"Two tests are called {outcome.name!r}.")
        by_name[outcome.name] = outcome
    expected = {FAILED: known.failures, SKIPPED: known.skips}
    listed = known.failures | known.skips
    found = list(by_name.values())
    counts = {became: sum(outcome.became == became for outcome in found) for became in (PASSED, FAILED, SKIPPED)}
    return Comparison(
        passed=counts[PASSED],
        failed=counts[FAILED],
        skipped=counts[SKIPPED],
        new=tuple(one for one in found if one.became != PASSED and one.name not in expected[one.became]),
        mended=tuple(one.name for one in found if one.became == PASSED and one.name in listed),
        missing=tuple(sorted(listed - by_name.keys())),
        lost=max(0, known.passed - counts[PASSED]),
    )


def shrunk(known: Known, comparison: Comparison) -> Known:
    """The list without what passes or is no more; it never gets a name that it did not have."""
    gone = {*comparison.mended, *comparison.missing}

    def left(reasons: tuple[Reason, ...]) -> tuple[Reason, ...]:
        kept = (Reason(one.text, tuple(name for name in one.names if name not in gone)) for one in reasons)
        return tuple(one for one in kept if one.names)

    return Known(max(known.passed, comparison.passed), left(known.failed), left(known.not_applicable))


def read_known(path: Path) -> Known:
    """Read a list. Raises ValueError for a name that is listed twice, or that has no reason."""
    document = tomllib.loads(path.read_text())
    known = Known(document["passed"], _reasons(document, "failed"), _reasons(document, "not_applicable"))
    names = [name for reason in (*known.failed, *known.not_applicable) for name in reason.names]
    twice = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
    if twice:
        raise ValueError(f"{path} lists twice: {sorted(twice)}")
    return known


def _reasons(document: Mapping[str, Any], kind: str) -> tuple[Reason, ...]:
    reasons = []
    for entry in document.get(kind, ()):
        if not entry["reason"].strip():
            raise ValueError(f"An entry of {kind!r} has no reason.")
        names = [f"{group}::{name}" for group, members in entry["tests"].items() for name in members]
        reasons.append(Reason(entry["reason"], tuple(names)))
    return tuple(reasons)


def write_known(path: Path, known: Known) -> None:
    """Write a list: for each reason the names, by the group that their first part names."""
    lines = [f"passed = {known.passed}"]
    for kind, reasons in (("failed", known.failed), ("not_applicable", known.not_applicable)):
        for reason in reasons:
            lines += ["", f"[[{kind}]]", f"reason = {_text(reason.text)}", f"[{kind}.tests]"]
            groups: dict[str, list[str]] = {}
            for name in sorted(reason.names):
                group, _, rest = name.partition("::")
                groups.setdefault(group, []).append(rest)
            for group, members in groups.items():
                lines += [f"{_text(group)} = [", *(f"    {_text(member)}," for member in members), "]"]
    path.write_text("\n".join(lines) + "\n")


def _text(text: str) -> str:
    """A string as TOML writes it, which takes JSON's."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")

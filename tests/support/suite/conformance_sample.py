"""The part of large tables that `make conformance` runs: a sample for each release, which rotates by a seed.

A test has `@pytest.mark.sampled(4)`: of its rows about one release, four run; of all its rows, if it is about none or
with `of_all=True`. A fuzz takes a share of its seeds. The seed of the sample is the day's number, or CONFORMANCE_SEED.
`make conformance ARGS=--every` runs all, as a nightly run does.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

import pytest
from conformance_table import MARK, OMITTED, release_of

SEED = "CONFORMANCE_SEED"
SHARES = 10
"""A fuzz runs one of so many parts of its seeds, and a test of a long table one of so many parts of that."""

Seeds = Callable[[range], range]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that turns sampling off."""
    parser.addoption("--every", action="store_true", help="run whole tables of the conformance suite, not samples")


def pytest_configure() -> None:
    """Choose the seed, which the processes of a run inherit."""
    os.environ.setdefault(SEED, str(datetime.now(UTC).date().toordinal()))


@pytest.fixture
def share(request: pytest.FixtureRequest) -> Seeds:
    """The part of a range of seeds that runs; all of it with --every."""

    def part(seeds: range) -> range:
        if request.config.option.every:
            return seeds
        length = -(-len(seeds) // SHARES)
        start = int(os.environ[SEED]) % SHARES * length
        return seeds[start : start + length] or seeds[:length]

    return part


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the rows that the sample has not. Other markers have chosen already."""
    if config.option.markexpr != MARK or config.option.every:
        return
    left_out = omitted(items, os.environ[SEED])
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def omitted(items: Iterable[pytest.Item], seed: str) -> list[pytest.Item]:
    """Return the rows that the sample of *seed* leaves out. The first row of a sample notes how many these are."""
    groups: Mapping[tuple[str, Any], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if (mark := item.get_closest_marker("sampled")) is not None:
            release = "" if mark.kwargs.get("of_all") else _release(item)
            groups[item.nodeid.partition("[")[0], release].append(item)
    left_out: list[pytest.Item] = []
    for (_, release), rows in groups.items():
        number = rows[0].get_closest_marker("sampled").args[0]
        rows.sort(key=lambda row: sha256(f"{seed} {row.nodeid}".encode()).digest())
        left_out += rows[number:]
        if rows[number:] and release:
            notes = [(OMITTED, f"{release}/{aspect}/{len(rows[number:])}") for aspect in _aspects(rows[0])]
            rows[0].user_properties.extend(notes)
    return left_out


def _release(item: pytest.Item) -> Any:
    try:
        return release_of(item.callspec.params)
    except StopIteration:
        return ""


def _aspects(item: pytest.Item) -> Sequence[str]:
    return [mark.args[0] for mark in item.iter_markers("aspect")]

"""The table of the conformance suite: what is counted, what is empty, and when that fails a run."""

from types import SimpleNamespace
from typing import Any

import conformance_table
import pytest
from checkpoints import CHECKPOINTS, NETWORKS
from conformance_table import Count
from tables import table


def report(*properties: str, when: str = "call") -> Any:
    return SimpleNamespace(when=when, user_properties=[("other", "a/b"), *(("conformance", one) for one in properties)])


STATS = {
    "passed": [report("a/ids"), report("a/ids", "a/TP"), report("a/ids", when="teardown"), SimpleNamespace()],
    "failed": [report("a/TP")],
    "error": [report("b/ids", when="setup")],
}
COUNTS = {("a", "ids"): Count(2), ("a", "TP"): Count(1, 1), ("b", "ids"): Count(0, 1)}


def test_reports_are_counted_once() -> None:
    assert conformance_table.counted(STATS) == COUNTS


def test_a_sample_says_of_how_many_it_is() -> None:
    passed = report("a/ids")
    passed.user_properties.append(("omitted", "a/ids/41"))
    counts = conformance_table.counted({"passed": [passed]})
    assert counts == {("a", "ids"): Count(1, 0, 41)}
    _, row, *_ = conformance_table.lines(counts, ["a"], {})
    assert row.split()[2] == "1/42"


def test_a_row_for_each_release_then_the_reasons() -> None:
    head, a, b, reason = conformance_table.lines(COUNTS, ["a", "b"], {("b", "TP"): "It has one head."})
    assert head.split() == list(conformance_table.ASPECTS)
    assert a.split() == ["a", "MISSING", "2", *4 * ["MISSING"], "1", "FAIL", *2 * ["MISSING"]]
    assert b.split() == ["b", "MISSING", "1", "FAIL", *4 * ["MISSING"], "none", *2 * ["MISSING"]]
    assert reason == "b, TP: It has one head."


def test_holes_without_a_reason() -> None:
    full = {("a", aspect): Count(1) for aspect in conformance_table.ASPECTS}
    assert conformance_table.unexplained(full, ["a"]) == []
    assert conformance_table.unexplained(
        full, ["a", "b"], {("b", aspect): "" for aspect in conformance_table.ASPECTS[1:]}
    ) == [("b", "layout")]


def test_every_reason_is_for_a_cell() -> None:
    assert {name for name, _ in conformance_table.HOLES} <= set(CHECKPOINTS)
    assert {aspect for _, aspect in conformance_table.HOLES} <= set(conformance_table.ASPECTS)
    without_network = {name for name, aspect in conformance_table.HOLES if aspect == "logits"}
    assert set(CHECKPOINTS) - set(NETWORKS) == without_network


def session(stats: dict[str, list[Any]], exit_code: int = 0, source: str = "TESTPATHS", **options: Any) -> Any:
    """A run that ended, of the whole suite unless *source* or *options* say otherwise."""
    defaults = {"markexpr": "conformance", "keyword": "", "deselect": None, "ignore": None, "ignore_glob": None}
    config = SimpleNamespace(
        option=SimpleNamespace(**{**defaults, "collectonly": False, **options}),
        args_source=pytest.Config.ArgsSource[source],
        pluginmanager=SimpleNamespace(get_plugin=lambda _: SimpleNamespace(stats=stats)),
    )
    return SimpleNamespace(config=config, exitstatus=pytest.ExitCode(exit_code))


FULL = {"passed": [report(f"{name}/{aspect}") for name in CHECKPOINTS for aspect in conformance_table.ASPECTS]}


@table(
    ("ended", "exit_code"),
    [
        (session(FULL), 0),
        (session(STATS), 1),
        (session({}), 1),
        (session(STATS, exit_code=2), 2),
        (session(STATS, keyword="ids"), 0),
        (session(STATS, markexpr="not conformance"), 0),
        (session(STATS, source="ARGS"), 0),
        (session(STATS, source="INVOCATION_DIR"), 1),
        (session(STATS, deselect=["a"]), 0),
    ],
)
def test_a_whole_run_with_an_unexplained_hole_fails(ended: Any, exit_code: int) -> None:
    conformance_table.pytest_sessionfinish(ended)
    assert ended.exitstatus == exit_code

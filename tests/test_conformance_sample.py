"""The sample of the conformance suite: so many rows for each release, others by another seed."""

from types import SimpleNamespace
from typing import Any

import pytest
from conformance_sample import SEED, SHARES, Seeds, omitted


def row(name: str, number: int, sampled: int | None = 2, **options: bool) -> Any:
    """A row of the test `t` about the release *name*."""
    marks = {"sampled": None if sampled is None else SimpleNamespace(args=(sampled,), kwargs=options)}
    return SimpleNamespace(
        nodeid=f"f.py::t[{name}-{number}]",
        callspec=SimpleNamespace(params={"name": name}),
        user_properties=[],
        get_closest_marker=marks.get,
        iter_markers=lambda _: [SimpleNamespace(args=("ids",))],
    )


def chosen(seed: str, rows: list[Any]) -> list[str]:
    """What runs."""
    left_out = omitted(rows, seed)
    return [one.nodeid for one in rows if one not in left_out]


def rows_of(*names: str, sampled: int | None = 2) -> list[Any]:
    return [row(name, number, sampled) for name in names for number in range(9)]


def test_each_release_has_as_many_rows_as_the_mark_says() -> None:
    names = [nodeid.partition("[")[2][0] for nodeid in chosen("1", rows_of("a", "b"))]
    assert names == ["a", "a", "b", "b"]


def test_a_seed_chooses_the_same_rows_in_every_process_and_another_seed_others() -> None:
    assert chosen("1", rows_of("a")) == chosen("1", list(reversed(rows_of("a"))))[::-1]
    assert len({tuple(chosen(str(seed), rows_of("a"))) for seed in range(9)}) > 3


def test_a_sample_may_be_of_all_rows() -> None:
    rows = [row(name, number, of_all=True) for name in "ab" for number in range(9)]
    assert len(chosen("1", rows)) == 2
    assert not any(one.user_properties for one in rows), "a release may have all of its rows, or none"


def test_a_share_of_seeds_is_whole_with_every_and_rotates_without(
    share: Seeds, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request.config.option, "every", False)
    parts = []
    for seed in range(SHARES):
        monkeypatch.setenv(SEED, str(seed))
        parts += share(range(5, 105))
    assert parts == list(range(5, 105))
    assert all(len(share(range(few))) == 1 for few in range(1, SHARES))
    monkeypatch.setattr(request.config.option, "every", True)
    assert share(range(7)) == range(7)


def test_a_test_without_the_mark_runs_whole() -> None:
    assert len(chosen("1", rows_of("a", sampled=None))) == 9


def test_the_number_of_rows_that_do_not_run_is_noted_once() -> None:
    rows = rows_of("a")
    omitted(rows, "1")
    assert [note for one in rows for note in one.user_properties] == [("omitted", "a/ids/7")]

"""Predictions live for a while, and are bounded."""

from saccade.routing.predictions import Predictions


def test_they_expire() -> None:
    predictions = Predictions(time_to_live_seconds=5)
    predictions.add("a", [b"1", b"2"], now=10)
    predictions.add("a", [b"1"], now=12)
    assert set(predictions.held("a", now=14.9)) == {b"1", b"2"}
    assert set(predictions.held("a", now=15)) == {b"1"}
    assert not predictions.held("a", now=17)
    assert not predictions.held("b", now=11)


def test_they_are_taken_back() -> None:
    predictions = Predictions()
    predictions.add("a", [b"1", b"2"], now=0)
    predictions.retract("a", [b"2", b"3"])
    assert set(predictions.held("a", now=0)) == {b"1"}
    predictions.forget("a")
    assert not predictions.held("a", now=0)


def test_the_oldest_make_room() -> None:
    predictions = Predictions(max_keys=2)
    predictions.add("a", [b"1", b"2", b"3"], now=0)
    assert list(predictions.held("a", now=0)) == [b"2", b"3"]

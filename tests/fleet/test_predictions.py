"""Predictions live for a while, and are bounded."""

from saccade.fleet.expectations import Predictions


def test_predictions_expire() -> None:
    predictions = Predictions(5, 9)
    predictions.add("a", [b"1", b"2"], now=10)
    predictions.add("a", [b"1"], now=12)
    assert set(predictions.expected("a", now=14.9)) == {b"1", b"2"}
    assert set(predictions.expected("a", now=15)) == {b"1"}
    assert not predictions.expected("a", now=17)
    assert not predictions.expected("b", now=11)


def test_withdrawn_predictions_keep_keys_expected_by_others() -> None:
    predictions = Predictions(5, 9)
    first = predictions.add("a", [b"1", b"2"], now=0)
    predictions.add("a", [b"2"], now=1)
    predictions.withdraw("a", first)
    assert set(predictions.expected("a", now=1)) == {b"2"}
    predictions.forget("a")
    predictions.withdraw("a", first)
    assert not predictions.expected("a", now=1)


def test_oldest_predictions_are_evicted() -> None:
    predictions = Predictions(5, 2)
    predictions.add("a", [b"1"], now=0)
    predictions.add("a", [b"2", b"3"], now=0)
    assert list(predictions.expected("a", now=0)) == [b"2", b"3"]
    assert predictions.add("a", [b"4", b"5", b"6"], now=0).keys == [b"4", b"5"]
    assert list(predictions.expected("a", now=0)) == [b"4", b"5"]

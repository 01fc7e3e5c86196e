"""The choice of a worker."""

import pytest

from saccade.routing.policy import WorkInFlight, least_work


@pytest.mark.parametrize(
    ("work", "chosen"),
    [
        ({"a": WorkInFlight(), "b": WorkInFlight()}, "a"),
        ({"a": WorkInFlight(2, 10), "b": WorkInFlight(1, 9000)}, "b"),
        ({"a": WorkInFlight(1, 11), "b": WorkInFlight(1, 10)}, "b"),
    ],
)
def test_least_work(work: dict[str, WorkInFlight], chosen: str) -> None:
    assert least_work(work) == chosen


def test_work_comes_and_goes() -> None:
    work = WorkInFlight().plus(7).plus(5)
    assert work == WorkInFlight(2, 12)
    assert work.minus(7).minus(5) == WorkInFlight()

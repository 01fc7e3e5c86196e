"""What proposals cost, by the times that steps took. F17"""

import pytest
from tables import table

from saccade.engine.core.proposal_prices import RISE, StepTimes


def times(seconds: dict[int, float]) -> StepTimes:
    subject = StepTimes()
    for num_tokens, value in seconds.items():
        subject.add(num_tokens, value)
    return subject


KNOWN = {5: 1.8, 1: 1.0}


@table(
    ("known", "num_tokens", "seconds"),
    [
        (KNOWN, 1, 1.0),
        (KNOWN, 2, 1.2),
        (KNOWN, 5, 1.8),
        (KNOWN, 9, 2.6),
        (KNOWN, 0, 0.0),
        ({4: 2.0}, 1, 0.5),
        ({4: 2.0}, 8, 4.0),
        ({}, 3, 0.0),
    ],
)
def test_times_lie_on_lines_between_measured_steps(known: dict[int, float], num_tokens: int, seconds: float) -> None:
    assert times(known).of(num_tokens) == pytest.approx(seconds)


@table(
    ("num_rows", "num_tokens", "num_more", "price"),
    [
        (1, 1, 1, 0.2),
        (1, 1, 4, 0.8),
        (2, 2, 3, 1.0),  # both rows wait
        (2, 4, 1, 1 / 3),  # for the second row's proposal, after two of the first
    ],
)
def test_a_price_is_what_the_rows_could_draw_in_the_time(
    num_rows: int, num_tokens: int, num_more: int, price: float
) -> None:
    assert times({**KNOWN, 2: 1.2}).prices(num_rows, num_tokens).of(num_more) == pytest.approx(price)


@table(
    ("known", "num_rows", "prices"),
    [
        ({}, 1, [1, 4]),
        ({5: 1.0}, 4, [4, 16]),  # else rows that always have proposals would never be compared with rows that have none
        ({1: 1.0}, 1, [1, 4]),  # before any is tried, a proposal costs as much as a token
        ({1: 1.0, 5: 0.5}, 1, [0, 0]),
        ({1: 1.0, 5: 90.0}, 1, [1, 4]),
        ({2: 1.0, 3: 90.0}, 2, [2, 8]),
    ],
)
def test_a_proposal_costs_between_nothing_and_a_step(
    known: dict[int, float], num_rows: int, prices: list[float]
) -> None:
    subject = times(known).prices(num_rows, num_rows)
    assert [subject.of(count) for count in (1, 4)] == prices


@table(("credit", "count"), [(0.0, 0), (0.19, 0), (0.21, 1), (0.7, 3), (9.0, 4)])
def test_credit_covers_so_many(credit: float, count: int) -> None:
    assert times(KNOWN).prices(1, 1).num_covered(credit, 4) == count


def test_a_slow_step_counts_little_and_a_fast_one_at_once() -> None:
    subject = times({1: 1.0})
    subject.add(1, 9.0)
    assert subject.of(1) == 1 + 8 / RISE
    subject.add(1, 0.9)
    assert subject.of(1) == 0.9

"""What is expected lives for a while, and is bounded."""

from hypothesis import given
from hypothesis import strategies as st

from saccade.fleet.expectations import Expectations


def test_expectations_expire() -> None:
    expectations = Expectations(5, 9)
    expectations.add(0, [b"1", b"2"], now=10)
    expectations.add(0, [b"1"], now=12)
    expectations.expire(14.9)
    assert set(expectations.expected(0)) == {b"1", b"2"}
    expectations.expire(15)
    assert set(expectations.expected(0)) == {b"1"}
    expectations.expire(17)
    assert not expectations.expected(0)
    assert not expectations


def test_withdrawn_expectations_keep_keys_expected_by_others() -> None:
    expectations = Expectations(5, 9)
    first = expectations.add(0, [b"1", b"2"], now=0)
    expectations.add(0, [b"2"], now=1)
    expectations.withdraw(first)
    assert set(expectations.expected(0)) == {b"2"}
    expectations.forget(0)
    expectations.withdraw(first)
    assert not expectations.expected(0)


def test_oldest_expectations_are_evicted() -> None:
    expectations = Expectations(5, 2)
    expectations.add(0, [b"1"], now=0)
    expectations.add(0, [b"2", b"3"], now=0)
    assert list(expectations.expected(0)) == [b"2", b"3"]
    assert expectations.add(0, [b"4", b"5", b"6"], now=0).keys == [b"4", b"5"]
    assert list(expectations.expected(0)) == [b"4", b"5"]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "withdraw", "expire", "forget"]),
        st.integers(0, 3),
        st.lists(st.integers(0, 6), max_size=4, unique=True),
    ),
    max_size=40,
)


@given(STEPS)
def test_rows_of_a_key_are_those_where_it_is_expected(steps: list[tuple[str, int, list[int]]]) -> None:
    """Whatever is added, withdrawn, expired and forgotten."""
    expectations, added = Expectations(5, 6), []
    for now, (step, row, numbers) in enumerate(steps):
        if step == "add":
            added.append(expectations.add(row, [bytes([number]) for number in numbers], now))
        elif step == "withdraw" and added:
            expectations.withdraw(added.pop())
        elif step == "expire":
            expectations.expire(now)
        elif step == "forget":
            expectations.forget(row)
        for key in (bytes([number]) for number in range(7)):
            rows = sum(1 << one for one in range(4) if key in expectations.expected(one))
            assert expectations.rows_of(key) == rows

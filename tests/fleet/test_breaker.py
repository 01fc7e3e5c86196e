"""Circuit breakers."""

from saccade.fleet.breaker import CLOSED, FAILURES, FIRST_SECONDS, LIMIT_SECONDS, Breakers


def opened(now: float = 0.0) -> Breakers:
    breakers = Breakers()
    opening = [breakers.failed("a", "it died", now) for _ in range(FAILURES)]
    assert opening == [False] * (FAILURES - 1) + [True]
    return breakers


def test_a_worker_that_fails_again_and_again_gets_nothing_for_a_while() -> None:
    breakers = opened(now=10)
    assert not breakers.allows("a", now=10)
    assert breakers.allows("b", now=10)
    report = breakers.report("a", now=10.25)
    assert (report.state, report.wait_seconds) == ("open", FIRST_SECONDS - 0.25)
    assert "3 requests in a row" in report.reason
    assert "it died" in report.reason
    assert breakers.report("b", now=10) == CLOSED


def test_an_answer_in_between_starts_the_count_anew() -> None:
    breakers = Breakers()
    for _ in range(3 * FAILURES):
        assert not breakers.failed("a", "", now=0)
        assert not breakers.succeeded("a")
    assert breakers.allows("a", now=0)


def test_one_trial_at_a_time_and_success_closes() -> None:
    breakers = opened()
    assert breakers.allows("a", now=1)
    assert breakers.report("a", now=1).state == "half_open"
    breakers.on_send("a", now=1)
    assert breakers.report("a", now=1).state == "half_open"
    assert not breakers.allows("a", now=1.5)
    assert breakers.succeeded("a")
    assert breakers.allows("a", now=1.5)
    assert breakers.report("a", now=1.5) == CLOSED


def test_a_failed_trial_opens_for_twice_as_long() -> None:
    breakers = opened()
    now, wait_seconds = 1.0, FIRST_SECONDS
    for _ in range(7):
        breakers.on_send("a", now)
        assert breakers.failed("a", "", now)
        wait_seconds = min(2 * wait_seconds, LIMIT_SECONDS)
        assert breakers.report("a", now).wait_seconds == wait_seconds
        now += wait_seconds
        assert breakers.allows("a", now)
    assert wait_seconds == LIMIT_SECONDS


def test_earlier_requests_do_not_open_the_breaker_further() -> None:
    breakers = opened()
    for _ in range(10):
        assert not breakers.failed("a", "", now=0.5)
    assert breakers.allows("a", now=1)


def test_a_trial_without_an_outcome_is_followed_by_another() -> None:
    breakers = opened()
    breakers.on_send("a", now=1)
    assert breakers.allows("a", now=2)
    breakers.forget("a")
    assert breakers.report("a", now=1) == CLOSED

"""The choice of a worker."""

from collections import Counter
from random import Random

import pytest

from saccade.routing.policy import Candidate, Chooser, Policy, WorkInFlight


def chosen(policy: Policy, *candidates: Candidate, reported: bool = False, affinity: bytes = b"") -> Counter[str]:
    """How often each is chosen of many times."""
    chooser = Chooser(policy, Random(0))
    return Counter(chooser.choose(candidates, affinity, reported=reported).name for _ in range(60))


IDLE = WorkInFlight()
A, B = Candidate("a"), Candidate("b")


@pytest.mark.parametrize(
    ("a", "b", "least"),
    [
        (WorkInFlight(2, 10), WorkInFlight(1, 9000), "b"),
        (WorkInFlight(1, 11), WorkInFlight(1, 10), "b"),
        (IDLE, WorkInFlight(1, 1), "a"),
    ],
)
@pytest.mark.parametrize("policy", ["least_load", "power_of_two", "auto"])
def test_least_load(policy: Policy, a: WorkInFlight, b: WorkInFlight, least: str) -> None:
    assert set(chosen(policy, Candidate("a", a), Candidate("b", b))) == {least}


@pytest.mark.parametrize("policy", ["least_load", "power_of_two", "cost", "auto"])
def test_ties_are_broken_at_random(policy: Policy) -> None:
    assert min(chosen(policy, A, B).values()) > 15


@pytest.mark.parametrize(
    ("a", "b", "cheaper"),
    [
        (Candidate("a", left_tokens=8), Candidate("b", left_tokens=200), "a"),
        # The holder has prompts to compute that outweigh what it holds.
        (Candidate("a", WorkInFlight(1, 300, prefill_tokens=300), 8), Candidate("b", left_tokens=200), "b"),
        # Requests in decode weigh a token for each block: the holder keeps its repeats.
        (Candidate("a", WorkInFlight(4, 800, decode_blocks=52), 8), Candidate("b", left_tokens=200), "a"),
        (Candidate("a", WorkInFlight(1, 800, decode_blocks=50), 8), Candidate("b", left_tokens=8), "b"),
    ],
)
def test_cost_is_work_left_and_load(a: Candidate, b: Candidate, cheaper: str) -> None:
    assert set(chosen("cost", a, b)) == {cheaper}
    assert set(chosen("auto", a, b, reported=True)) == {cheaper}


def test_round_robin_takes_turns() -> None:
    assert chosen("round_robin", B, A, Candidate("c")) == {"a": 20, "b": 20, "c": 20}


def test_power_of_two_never_takes_the_busiest() -> None:
    busy = Candidate("c", WorkInFlight(9, 9))
    assert set(chosen("power_of_two", A, B, busy)) == {"a", "b"}


def test_consistent_hash_moves_only_prompts_of_a_worker_that_goes() -> None:
    chooser = Chooser("consistent_hash", Random(0))
    workers = [Candidate(name, WorkInFlight(load)) for load, name in enumerate("abcd")]
    before = {key: chooser.choose(workers, bytes([key])).name for key in range(200)}
    after = {key: chooser.choose(workers[1:], bytes([key])).name for key in range(200)}
    assert min(Counter(before.values()).values()) > 20
    assert all(after[key] == name for key, name in before.items() if name != "a")


def test_work_comes_and_goes() -> None:
    work = WorkInFlight().plus(WorkInFlight(1, 7, 3)).plus(WorkInFlight(1, 5, 0, 1))
    assert work == WorkInFlight(2, 12, 3, 1)
    assert work.minus(WorkInFlight(1, 7, 3)).minus(WorkInFlight(1, 5, 0, 1)) == WorkInFlight()

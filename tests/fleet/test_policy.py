"""The choice of a worker."""

import math
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
from tables import table

from saccade.fleet.cost import Candidates, Chooser, Policy, WorkInFlight, seed_of


class Candidate(NamedTuple):
    """One of the Candidates."""

    name: str
    work: WorkInFlight = WorkInFlight()
    prompt_tokens: int = 0
    image_tokens: int = 0
    held_tokens: int = 0
    foreign_requests: int = 0
    foreign_running: int = 0
    foreign_decode_blocks: int = 0
    recompute_weight: float = 1.5
    weight: float = 1.0


ROWS = ["a", "b", "c", "d", "heavy", "light", "half", "holder", "elsewhere"]
TERMS = (
    "prompt_tokens", "image_tokens", "held_tokens", "foreign_requests", "foreign_running", "foreign_decode_blocks"
)  # fmt: skip


def choose(chooser: Chooser, each: Sequence[Candidate], affinity: bytes = b"", *, reported: bool = False) -> str:
    """The name of the chosen one."""
    column = {name: np.array([getattr(one, name) for one in each]) for name in TERMS}
    work = np.array([one.work for one in each]).T
    candidates = Candidates(
        rows=np.array([ROWS.index(one.name) for one in each]),
        seeds=np.array([seed_of(one.name.encode()) for one in each], np.uint64),
        work=work,
        overlap_tokens=column["held_tokens"],
        weights=np.array([one.weight for one in each]),
        recompute_weight=each[0].recompute_weight,
        **column,
    )
    return each[chooser.choose(candidates, affinity, reported=reported)].name


def chosen(policy: Policy, *candidates: Candidate, reported: bool = False) -> Counter[str]:
    """How often each is chosen of many times."""
    chooser = Chooser(policy, Random(0))
    return Counter(choose(chooser, candidates, reported=reported) for _ in range(60))


IDLE = WorkInFlight()
A, B = Candidate("a"), Candidate("b")


@table(
    ("a", "b", "least"),
    [
        (WorkInFlight(2, 10), WorkInFlight(1, 9000), "b"),
        (WorkInFlight(1, 11), WorkInFlight(1, 10), "b"),
        (IDLE, WorkInFlight(1, 1), "a"),
    ],
)
@table("policy", ["least_load", "power_of_two", "auto"])
def test_least_load(policy: Policy, a: WorkInFlight, b: WorkInFlight, least: str) -> None:
    assert set(chosen(policy, Candidate("a", a), Candidate("b", b))) == {least}


@pytest.mark.parametrize("policy", ["least_load", "power_of_two", "cost", "auto"])
def test_ties_are_broken_at_random(policy: Policy) -> None:
    assert min(chosen(policy, A, B).values()) > 15


@table(
    ("a", "b", "cheaper"),
    [
        (Candidate("a", prompt_tokens=8), Candidate("b", prompt_tokens=200), "a"),
        (Candidate("a", prompt_tokens=8), Candidate("b", prompt_tokens=2, image_tokens=7), "a"),
        # The holder has prompts to compute that outweigh what it holds.
        (Candidate("a", WorkInFlight(1, 300, prefill_tokens=300), 8), Candidate("b", prompt_tokens=200), "b"),
        # One new image that waits there takes no repeat away from its holder.
        (
            Candidate("a", WorkInFlight(1, 219, prefill_tokens=415), 27),
            Candidate("b", prompt_tokens=219, image_tokens=196),
            "a",
        ),
        # Requests in decode weigh a token for each block: the holder keeps its repeats.
        (Candidate("a", WorkInFlight(4, 800, decode_blocks=52), 8), Candidate("b", prompt_tokens=200), "a"),
        (Candidate("a", WorkInFlight(1, 800, decode_blocks=50), 8), Candidate("b", prompt_tokens=8), "b"),
        # Requests that another gateway sent wait there, and are taken to be as long as this prompt.
        (Candidate("a", prompt_tokens=8, held_tokens=192, foreign_requests=1), Candidate("b", prompt_tokens=200), "a"),
        (Candidate("a", prompt_tokens=8, held_tokens=192, foreign_requests=2), Candidate("b", prompt_tokens=200), "b"),
        # One that runs there counts by its blocks, as this gateway's own do.
        (Candidate("a", prompt_tokens=8, foreign_decode_blocks=13), Candidate("b", prompt_tokens=16), "b"),
        (Candidate("a", prompt_tokens=8, foreign_decode_blocks=13), Candidate("b", prompt_tokens=200), "a"),
    ],
)
def test_cost_is_work_left_and_load(a: Candidate, b: Candidate, cheaper: str) -> None:
    assert set(chosen("cost", a, b)) == {cheaper}
    assert set(chosen("auto", a, b, reported=True)) == {cheaper}


@table(("weight", "chosen_name"), [(1, "elsewhere"), (1.5, "holder"), (3, "holder")])
def test_a_repeat_stays_with_its_busy_holder_by_weight(weight: float, chosen_name: str) -> None:
    """Weight 1 compares the prompt's own waiting times."""
    holder = Candidate("holder", WorkInFlight(1, 219, prefill_tokens=415), 27, recompute_weight=weight)
    other = Candidate("elsewhere", prompt_tokens=219, image_tokens=196, recompute_weight=weight)
    assert set(chosen("cost", holder, other)) == {chosen_name}


@pytest.mark.parametrize("policy", ["least_load", "power_of_two"])
def test_requests_of_other_gateways_are_load(policy: Policy) -> None:
    assert set(chosen(policy, Candidate("a", foreign_requests=2), Candidate("b", WorkInFlight(1, 9)))) == {"b"}
    assert set(chosen(policy, Candidate("a", foreign_running=2), Candidate("b", WorkInFlight(1, 9)))) == {"b"}


def test_temperature_draws_by_cost() -> None:
    """The probabilities are the softmax of the costs, scaled to [0, 1]: exp(-0), exp(-0.5 / 2), exp(-1 / 2)."""
    candidates = [Candidate(name, prompt_tokens=cost) for name, cost in (("a", 100), ("b", 200), ("c", 300))]
    chooser = Chooser("cost", Random(0), temperature=2)
    counts = Counter(choose(chooser, candidates) for _ in range(20000))
    total = 1 + math.exp(-0.25) + math.exp(-0.5)
    for name, weight in (("a", 1.0), ("b", math.exp(-0.25)), ("c", math.exp(-0.5))):
        assert counts[name] / 20000 == pytest.approx(weight / total, abs=0.02)


def test_a_low_temperature_takes_the_least_and_equals_are_drawn_alike() -> None:
    chooser = Chooser("auto", Random(0), temperature=0.001)
    cheap, dear = Candidate("a", prompt_tokens=1), Candidate("b", prompt_tokens=900)
    assert {choose(chooser, [cheap, dear], reported=True) for _ in range(60)} == {"a"}
    assert min(Counter(choose(chooser, [A, B], reported=True) for _ in range(60)).values()) > 15


def test_round_robin_takes_turns() -> None:
    assert chosen("round_robin", B, A, Candidate("c")) == {"a": 20, "b": 20, "c": 20}


def test_power_of_two_never_takes_the_busiest() -> None:
    busy = Candidate("c", WorkInFlight(9, 9))
    assert set(chosen("power_of_two", A, B, busy)) == {"a", "b"}


def test_consistent_hash_moves_only_prompts_of_a_worker_that_goes() -> None:
    chooser = Chooser("consistent_hash", Random(0))
    workers = [Candidate(name, WorkInFlight(load)) for load, name in enumerate("abcd")]
    before = {key: choose(chooser, workers, bytes([key])) for key in range(200)}
    after = {key: choose(chooser, workers[1:], bytes([key])) for key in range(200)}
    assert min(Counter(before.values()).values()) > 20
    assert all(after[key] == name for key, name in before.items() if name != "a")


HEAVY, LIGHT = Candidate("heavy", weight=2.0), Candidate("light")


@table(
    ("heavy", "light", "least"),
    [
        (WorkInFlight(2, 1), WorkInFlight(1, 1), "heavy"),  # 3 / 2 against 2, with this request
        (WorkInFlight(3, 1), WorkInFlight(1, 1), "light"),  # equal with this request, but 3 / 2 against 1 without it
        (WorkInFlight(4, 1), WorkInFlight(1, 1), "light"),
        (IDLE, IDLE, "heavy"),
    ],
)
@table("policy", ["least_load", "power_of_two"])
def test_load_counts_for_less_at_a_worker_of_more_weight(
    policy: Policy, heavy: WorkInFlight, light: WorkInFlight, least: str
) -> None:
    assert set(chosen(policy, HEAVY._replace(work=heavy), LIGHT._replace(work=light))) == {least}


@table(("heavy_tokens", "cheaper"), [(199, "heavy"), (201, "light")])
def test_cost_counts_for_less_at_a_worker_of_more_weight(heavy_tokens: int, cheaper: str) -> None:
    light = LIGHT._replace(prompt_tokens=100)
    assert set(chosen("cost", HEAVY._replace(prompt_tokens=heavy_tokens), light)) == {cheaper}


def test_round_robin_gives_turns_by_weight() -> None:
    assert chosen("round_robin", HEAVY, LIGHT, Candidate("half", weight=0.5)) == {"heavy": 34, "light": 17, "half": 9}
    chooser = Chooser("round_robin", Random(0))
    # The turns of a worker are spread, not in a row.
    assert [choose(chooser, [HEAVY, LIGHT]) for _ in range(6)] == ["heavy", "light", "heavy"] * 2


def test_round_robin_owes_a_worker_nothing_for_the_time_that_it_was_away() -> None:
    chooser = Chooser("round_robin", Random(0))
    for _ in range(50):
        choose(chooser, [A, B])
    assert [choose(chooser, [A, B, Candidate("c")]) for _ in range(6)].count("c") == 2


def test_consistent_hash_follows_weights_and_more_weight_takes_prompts_only_to_its_worker() -> None:
    chooser = Chooser("consistent_hash", Random(0))
    keys = [number.to_bytes(2, "little") for number in range(3000)]
    weighted = {key: choose(chooser, [HEAVY, LIGHT], key) for key in keys}
    assert Counter(weighted.values())["heavy"] == pytest.approx(2000, abs=100)
    equal = {key: choose(chooser, [HEAVY._replace(weight=1.0), LIGHT], key) for key in keys}
    assert all(weighted[key] == "heavy" for key, name in equal.items() if name == "heavy")

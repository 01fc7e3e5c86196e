"""The simulation behind the weight of the routing cost: workers compute what they must, and figures follow."""

from dataclasses import replace

import pytest
from tables import table

from benchmarks.routing_simulation.__main__ import measure
from benchmarks.routing_simulation.fleet import Simulation
from benchmarks.routing_simulation.traffic import BLOCK_SIZE, KINDS, Traffic
from benchmarks.routing_simulation.worker import BlockCache
from saccade.fleet.cost import WorkInFlight

pytestmark = pytest.mark.ci
FEW = Traffic(40, num_groups=20, num_workers=2)


def test_every_prompt_ends_and_leaves_no_work() -> None:
    simulation = Simulation(FEW.fleet, "cost", 1.5, seed=1)
    finished = simulation.run(FEW.arrivals(1))
    assert len(finished) == 100
    assert all(each.num_answered == each.prompt.num_answer for each in finished)
    assert {each.booking.router.work_of(each.booking.worker) for each in finished} == {WorkInFlight()}


def test_a_lone_worker_with_room_computes_what_is_shared_once() -> None:
    traffic = replace(FEW, rate=0.1, num_workers=1, num_cached_prompts=200)
    finished = Simulation(traffic.fleet, "cost", 1.5, seed=1).run(traffic.arrivals(1))
    shared = int(traffic.num_tokens * traffic.shared_part) // BLOCK_SIZE * BLOCK_SIZE
    assert {each.num_cached for each in finished if each.prompt.repeats} == {shared}
    assert {each.num_cached for each in finished if not each.prompt.repeats} == {0}


def test_nothing_is_cached_if_nothing_repeats() -> None:
    traffic = replace(KINDS["nothing repeats"], num_groups=40)
    assert [measure(traffic, policy, 1.5, seed=1).cached for policy in ("cost", "round_robin")] == [0, 0]


@table("seed", [1, 2])
def test_a_busy_fleet_answers_sooner_by_the_chosen_weight(seed: int) -> None:
    busy = replace(KINDS["50 requests/s, near saturation"], rate=15, num_workers=2, num_groups=120)
    own, waiting = (measure(busy, "cost", weight, seed) for weight in (1.5, 1))
    assert own.cached > waiting.cached
    assert own.mean_ms < waiting.mean_ms


def test_a_cache_evicts_the_oldest_of_what_nobody_uses() -> None:
    cache = BlockCache(3)
    assert cache.reserve(3) == []
    assert [cache.name(key) for key in (b"a", b"b", b"c")] == [True] * 3
    for key in (b"a", b"b"):
        cache.release(key)
    assert cache.reserve(3) is None
    assert cache.reserve(1) == [b"a"]
    assert (cache.has(b"a"), cache.has(b"b"), cache.has(b"c")) == (False, True, True)

"""A gateway over two real workers knows where every image is: repeats land on the worker that holds them.

The program `python -m benchmarks.fleet` holds the same gate over four workers and every family; this is a small one.
"""

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fleet import gate
from benchmarks.fleet.load import ask_all
from benchmarks.fleet.plan import Plan, repeats_found
from benchmarks.fleet.running import ADMIN_KEY, BROKEN, Gateway, gateway
from saccade.cli.main import run

pytestmark = pytest.mark.ci

ONE_CLIENT = Plan(num_images=10, num_asks=3, num_clients=1, size=(128, 96))
BLOCK = 16


@pytest.fixture(scope="module")
def by_cost(fleet_workers: list[str], fleet_folder: Path) -> Iterator[Gateway]:
    """A gateway that chooses by what workers hold; their caches are empty at first."""
    with gateway(fleet_workers, "auto", fleet_folder / "by_cost.log") as running:
        running.reset()
        yield running


def test_repeats_land_on_the_holder(
    by_cost: Gateway, fleet_plan: Plan, fleet_chats: list[dict[str, Any]]
) -> None:  # E5, E6, E7
    outcome = gate.measure(by_cost, fleet_plan, fleet_chats)
    assert gate.failures(outcome) == []
    assert outcome.num_repeats == 20
    assert all(worker["reason"] == worker["excluded"] == "" for worker in by_cost.workers())
    # The text before the image fills at least one block, which both images share.
    unseen = by_cost.route(fleet_chats[-1])
    (image,) = unseen["images"]
    assert image["start"] >= BLOCK
    assert max(one["overlap_blocks"] for one in unseen["candidates"]) == image["start"] // BLOCK
    assert gate.overlap_failures(by_cost, fleet_chats[0], fleet_chats[-1]) == []


@pytest.mark.conformance
def test_round_robin_hit_rate_follows_its_turns(
    fleet_workers: list[str], fleet_folder: Path, fleet_chats: list[dict[str, Any]]
) -> None:  # E6
    """The control: one client's repeats are cached exactly where their turns fall on a worker that has seen them."""
    with gateway(fleet_workers, "round_robin", fleet_folder / "round_robin.log") as running:
        running.reset()
        outcome = gate.measure(running, ONE_CLIENT, fleet_chats)
    found = repeats_found([*ONE_CLIENT.first, *ONE_CLIENT.repeats], ONE_CLIENT.num_images, 2)
    expected = statistics.mean(outcome.best_rate if one else outcome.unseen_rate for one in found)
    assert 0 < sum(found) < len(found)
    assert gate.not_measured(outcome) == []
    assert outcome.rate == pytest.approx(outcome.cached_rate)
    assert outcome.rate == pytest.approx(expected)
    assert gate.failures(outcome)


@pytest.mark.conformance
def test_keys_that_are_not_the_workers_fail_the_gate(
    fleet_workers: list[str], fleet_folder: Path, fleet_plan: Plan, fleet_chats: list[dict[str, Any]]
) -> None:  # E6
    with gateway(fleet_workers, "auto", fleet_folder / "broken.log", program=BROKEN) as running:
        running.reset()
        outcome = gate.measure(running, fleet_plan, fleet_chats)
    assert outcome.rate == 0
    assert gate.broken_failures(outcome) == []
    assert len(gate.failures(outcome)) == 3


def test_route_is_shown_and_nothing_is_booked(
    by_cost: Gateway, fleet_chats: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask_all(by_cost.url, fleet_chats, [0, 0], 1)
    by_cost.wait_until_idle()
    before = by_cost.hit_rates()
    chat = tmp_path / "chat.json"
    chat.write_text(json.dumps(fleet_chats[0]))
    command = ["inspect", str(chat), "--gateway", by_cost.admin_url, "--admin-key", ADMIN_KEY]
    assert run([*command, "--json"]) == 0
    route = json.loads(capsys.readouterr().out)
    chosen, other = sorted(route["candidates"], key=lambda one: not one["chosen"])
    assert chosen["worker"] == route["worker"]
    assert chosen["overlap_blocks"] == chosen["num_blocks"] == (route["prompt_tokens"] - 1) // BLOCK
    assert chosen["cost"]["total"] < other["cost"]["total"]
    assert other["cost"]["prompt_tokens"] > chosen["cost"]["prompt_tokens"]
    assert run(command) == 0
    shown = capsys.readouterr().out
    assert f"{chosen['num_blocks']} of {chosen['num_blocks']}" in shown
    assert "the least cost" in shown
    # The next real request goes there, and the looks have left nothing behind.
    (asked,) = ask_all(by_cost.url, fleet_chats, [0], 1)
    assert asked.cached_tokens == chosen["overlap_tokens"]
    assert by_cost.hit_rates().count == before.count + 1
    by_cost.wait_until_idle()
    assert [worker["booked"]["requests"] for worker in by_cost.workers()] == [0, 0]

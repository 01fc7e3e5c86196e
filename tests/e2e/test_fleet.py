"""A gateway over two real workers knows where every picture is: repeats land on the worker that holds them.

The program `python -m benchmarks.fleet` holds the same gate over four workers and every family; this is a small one.
"""

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fleet import gate
from benchmarks.fleet.load import ask_all, chats, photos
from benchmarks.fleet.plan import Plan, repeats_found
from benchmarks.fleet.running import ADMIN_KEY, Gateway, gateway, workers
from saccade.cli.main import run

PLAN = Plan(num_pictures=10, num_asks=3, num_clients=4, size=(128, 96))
ONE_CLIENT = Plan(num_pictures=10, num_asks=3, num_clients=1, size=(128, 96))
BLOCK = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where logs and pictures go."""
    return tmp_path_factory.mktemp("fleet")


@pytest.fixture(scope="module")
def worker_urls(tiny_qwen3_vl: Path, folder: Path) -> Iterator[list[str]]:
    """Two workers of one model."""
    with workers(tiny_qwen3_vl, 2, folder, ("--max-model-len", "1024")) as urls:
        yield urls


@pytest.fixture(scope="module")
def bodies(folder: Path) -> list[dict[str, Any]]:
    """A chat about each picture of the plan, and one about a picture that the plan does not ask about."""
    return chats(photos(folder, PLAN))


@pytest.fixture(scope="module")
def by_cost(worker_urls: list[str], folder: Path) -> Iterator[Gateway]:
    """A gateway that chooses by what workers hold; their caches are empty at first."""
    with gateway(worker_urls, "auto", folder / "by_cost.log") as running:
        running.reset()
        yield running


def test_repeats_land_on_the_holder(by_cost: Gateway, bodies: list[dict[str, Any]]) -> None:  # E5, E6, E7
    outcome = gate.measure(by_cost, PLAN, bodies)
    assert gate.failures(outcome) == []
    assert outcome.num_repeats == 20
    assert all(worker["reason"] == worker["excluded"] == "" for worker in by_cost.workers())
    # The text before the picture fills at least one block, which both pictures share.
    unseen = by_cost.route(bodies[-1])
    (picture,) = unseen["pictures"]
    assert picture["start"] >= BLOCK
    assert max(one["overlap_blocks"] for one in unseen["candidates"]) == picture["start"] // BLOCK
    assert gate.overlap_failures(by_cost, bodies[0], bodies[-1]) == []


def test_round_robin_finds_what_its_turns_give(
    worker_urls: list[str], folder: Path, bodies: list[dict[str, Any]]
) -> None:  # E6
    """The control: one client's repeats are cached exactly where their turns fall on a worker that has seen them."""
    with gateway(worker_urls, "round_robin", folder / "round_robin.log") as running:
        running.reset()
        outcome = gate.measure(running, ONE_CLIENT, bodies)
    found = repeats_found([*ONE_CLIENT.first, *ONE_CLIENT.repeats], ONE_CLIENT.num_pictures, 2)
    expected = statistics.mean(outcome.best_rate if one else outcome.unseen_rate for one in found)
    assert 0 < sum(found) < len(found)
    assert gate.not_measured(outcome) == []
    assert outcome.rate == pytest.approx(outcome.cached_rate)
    assert outcome.rate == pytest.approx(expected)
    assert gate.failures(outcome)


def test_keys_that_are_not_the_workers_fail_the_gate(
    worker_urls: list[str], folder: Path, bodies: list[dict[str, Any]]
) -> None:  # E6
    with gateway(worker_urls, "auto", folder / "broken.log", broken=True) as running:
        running.reset()
        outcome = gate.measure(running, PLAN, bodies)
    assert outcome.rate == 0
    assert gate.broken_failures(outcome) == []
    assert len(gate.failures(outcome)) == 3


def test_where_a_chat_would_go_is_shown_and_nothing_is_booked(
    by_cost: Gateway, bodies: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask_all(by_cost.url, bodies, [0, 0], 1)
    by_cost.wait_until_idle()
    before = by_cost.hit_rates()
    chat = tmp_path / "chat.json"
    chat.write_text(json.dumps(bodies[0]))
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
    (asked,) = ask_all(by_cost.url, bodies, [0], 1)
    assert asked.cached_tokens == chosen["overlap_tokens"]
    assert by_cost.hit_rates().count == before.count + 1
    by_cost.wait_until_idle()
    assert [worker["booked"]["requests"] for worker in by_cost.workers()] == [0, 0]

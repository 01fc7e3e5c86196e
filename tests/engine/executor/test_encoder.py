"""Images spread over ranks, or encoded by all: two processes hold the same features, whichever of them encoded and whatever failed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_program import BAD, CASES, CUT_CASES, WIDTH
from tables import table

from saccade.engine.executor.encoder import spread

pytestmark = pytest.mark.ci

PROGRAM = Path(__file__).parent / "rank_program.py"


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each of two processes found."""
    return found_by(2, tmp_path_factory.mktemp("ranks") / "file")


def found_by(size: int, rendezvous: Path) -> list[Any]:
    """What each of *size* processes found. They write to files: no rank waits for its output to be read."""
    outputs = [rendezvous.with_name(f"rank-{rank}") for rank in range(size)]
    processes = []
    for rank, output in enumerate(outputs):
        with output.open("wb") as file:
            command = [sys.executable, PROGRAM, str(rank), str(size), rendezvous]
            processes.append(subprocess.Popen(command, stdout=file))
    for process in processes:
        process.wait(timeout=120)
    return [json.loads(output.read_bytes().splitlines()[-1]) for output in outputs]


@pytest.mark.parametrize("name", CASES)
def test_every_rank_holds_every_image(both: list[Any], name: str) -> None:  # [eng] 37
    failed = [10 + i for i, grid in enumerate(CASES[name]) if grid == BAD]
    for found in (one[name] for one in both):
        for number, grid in enumerate(CASES[name]):
            own = torch.tensor(found["features"][str(10 + number)])
            assert own.shape == (grid[1] * grid[2], WIDTH)
            if 10 + number in found["failed"]:
                assert not own.any()
            else:
                assert torch.equal(own, ((number + 1) * 100 + torch.arange(WIDTH)).float().expand_as(own))
        assert set(failed) <= set(found["failed"])
    assert both[0][name]["failed"] == both[1][name]["failed"]
    num_encoded = [one[name]["num_encoded"] for one in both]
    assert sum(num_encoded) == len(CASES[name]) - len(both[0][name]["failed"])
    assert num_encoded == {"idle rank": [1, 0], "equal": [1, 1], "uneven": [1, 3]}.get(name, num_encoded)


def test_failure_fails_no_other_image_of_its_rank(both: list[Any]) -> None:
    assert both[0]["one fails on rank 0"]["failed"] == [10]
    assert both[0]["one fails on rank 1"]["failed"] == [11]


@table("name", CUT_CASES)
def test_an_image_that_a_cut_encoder_cannot_encode_fails_alone(both: list[Any], name: str) -> None:
    failed = [10 + i for i, grid in enumerate(CUT_CASES[name]) if grid == BAD]
    assert both[0][name] == both[1][name]
    found = both[0][name]
    assert (found["failed"], found["num_encoded"]) == (failed, len(CUT_CASES[name]) - len(failed))
    for number, grid in enumerate(CUT_CASES[name]):
        own = torch.tensor(found["features"][str(10 + number)])
        right = ((number + 1) * 100 + torch.arange(WIDTH)).float() * (10 + number not in failed)
        assert torch.equal(own, right.expand(grid[1] * grid[2], WIDTH))


@table("name", ["in slices", "in slices, cut"])
def test_slices_give_every_rank_the_features(both: list[Any], name: str) -> None:
    """The image in slices, and the whole one; that which no rank can encode fails alone."""
    assert both[0][name] == both[1][name]
    assert both[0][name]["failed"] == [[], [11]]
    for number, count in ((0, 4), (2, 3)):
        own = torch.tensor(both[0][name]["features"][str(10 + number)])
        assert torch.equal(own, ((number + 1) * 100 + torch.arange(WIDTH)).float().expand(count, WIDTH))


def test_sums_and_broadcasts(both: list[Any]) -> None:  # [eng] 38: by number in the group
    assert [one["sum"] for one in both] == [[2.0, 1.0]] * 2
    assert [one["attention"] for one in both] == [[2.0, 1.0]] * 2
    assert [one["from 1"] for one in both] == [[1, 7]] * 2


@pytest.mark.conformance
def test_sums_of_ranks_that_share_attention(tmp_path: Path) -> None:  # B8, [eng] 38: two groups, one for each copy
    four = found_by(4, tmp_path / "file")
    assert [one["sum"] for one in four] == [[4.0, 6.0]] * 4
    assert [one["attention"] for one in four] == [[2.0, 2.0], [2.0, 4.0]] * 2
    assert [one["from 1"] for one in four] == [[1, 7]] * 4


@pytest.mark.parametrize(
    ("costs", "size", "owners"),
    [
        ([5], 3, [0]),
        ([2, 2, 2, 2], 2, [0, 1, 0, 1]),
        ([1, 9, 3, 3, 2], 2, [1, 0, 1, 1, 1]),
        ([], 2, []),
        ([4, 4, 4], 1, [0, 0, 0]),
    ],
)
def test_images_go_to_the_rank_with_the_least_work(costs: list[int], size: int, owners: list[int]) -> None:
    assert spread(costs, size) == owners

"""The gateway that works on a batch is killed: another goes on, and asks no line again that has an answer."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.fleet.running import workers
from benchmarks.reliability.killed_batch import lines_about, run_batch, two_gateways
from saccade.cli.bundled import bundled

pytestmark = pytest.mark.ci
NUM_LINES = 60
LEASE_SECONDS = 10


def test_a_batch_outlives_kills_of_its_gateways(
    new_location: Callable[[], str], tiny_qwen3_vl: Path, tmp_path: Path
) -> None:  # F13, F20
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    moments = sorted(random.Random(seed).sample(range(1, NUM_LINES), 2))
    lines = lines_about(sorted(bundled("images").glob("texts/*.png")), NUM_LINES)
    with (
        workers(tiny_qwen3_vl, 1, tmp_path, ("--max-model-len", "1024")) as urls,
        two_gateways(tmp_path, urls, new_location(), LEASE_SECONDS) as gateways,
    ):
        outcome = run_batch(gateways, lines, moments)
    assert outcome.violations() == []
    assert len(outcome.kills) == 2

"""The gate of exact routing fails where anything is not as it must be, and where it cannot be known."""

import dataclasses
from pathlib import Path

import pytest
from server import free_port

from benchmarks.fleet import gate, report
from benchmarks.fleet.gate import Outcome
from benchmarks.fleet.plan import Plan, repeats_found
from benchmarks.fleet.running import Gateway, NotMeasured

pytestmark = pytest.mark.ci


PASSING = Outcome(
    num_repeats=800,
    num_observed=800.0,
    rate=0.95,
    cached_rate=0.95,
    best_rate=0.95,
    unseen_rate=0.07,
    exactness={"unix:/a": "EXACT", "unix:/b": "EXACT"},
    exact_in_log={"unix:/a", "unix:/b"},
)


def test_correct_outcome_passes() -> None:
    assert gate.failures(PASSING) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_observed": 799.0}, "grew by 799"),
        ({"num_observed": 801.0}, "grew by 801"),
        ({"exactness": {"unix:/a": "EXACT", "unix:/b": "NONE"}}, "in /workers"),
        ({"exactness": {}}, "in /workers"),
        ({"exact_in_log": {"unix:/a"}}, "in the log"),
        ({"rate": 0.94, "cached_rate": 0.94}, "best possible"),
        ({"cached_rate": 0.9}, "cached"),
        ({"rate": 0.8, "cached_rate": 0.8, "best_rate": 0.8}, "below 0.9"),
    ],
)
def test_every_part_of_the_gate_can_fail(change: dict[str, object], said: str) -> None:  # E6
    (found,) = gate.failures(dataclasses.replace(PASSING, **change))
    assert said in found


def test_controls_must_not_pass_the_gate() -> None:  # E6
    plan = Plan(num_images=40, num_asks=5)
    simulated = plan.round_robin_rate(2, hit=0.95, miss=0.07)
    assert gate.round_robin_failures(dataclasses.replace(PASSING, rate=simulated + 0.04), plan) == []
    for rate in (simulated - 0.06, simulated + 0.06):
        assert len(gate.round_robin_failures(dataclasses.replace(PASSING, rate=rate), plan)) == 1
    assert gate.broken_failures(dataclasses.replace(PASSING, rate=0.0)) == []
    assert len(gate.broken_failures(dataclasses.replace(PASSING, rate=0.06))) == 1
    assert len(gate.broken_failures(PASSING)) == 2


def test_turns_are_simulated() -> None:
    # The turns of worker 0 are 0, 2, 4: it sees the images 0, 0 and 1, and worker 1 sees 1 and 1.
    assert repeats_found([0, 1, 0, 1, 1], 2, 2) == [True, True, False]
    plan = Plan(num_images=100, num_asks=2)
    assert plan.round_robin_rate(1, hit=0.9, miss=0.0) == pytest.approx(0.9)
    assert plan.round_robin_rate(4, hit=1.0, miss=0.0) == pytest.approx(0.25, abs=0.02)
    assert sorted(plan.repeats) == sorted(plan.first) == list(range(100))
    assert plan.repeats != plan.first


def test_metrics_that_cannot_be_read_are_a_failure(tmp_path: Path) -> None:  # E6
    nobody = Gateway(free_port(), free_port(), tmp_path / "log")
    for read in (nobody.hit_rates, nobody.workers, nobody.reset):
        with pytest.raises(NotMeasured, match="cannot be read"):
            read()


def test_a_page_keeps_the_rows_of_other_runs(tmp_path: Path) -> None:
    facts = {"machine": "m", "commit": "c", "command": "x", "workers": 4}
    out = tmp_path / "fleet.json"
    report.add(out, {"family": "qwen2_vl", "part": "gate", "rate": 0.9, "failures": [], **facts})
    report.add(out, {"family": "qwen3_vl", "part": "gate", "failures": ["no metrics"], **facts})
    report.add(out, {"family": "qwen2_vl", "part": "gate", "rate": 0.95, "failures": [], **facts})
    page = out.with_suffix(".md").read_text()
    assert page.index("Qwen3-VL") < page.index("Qwen2-VL")
    assert "0.9500" in page
    assert "0.9000" not in page
    assert "FAILED: no metrics" in page

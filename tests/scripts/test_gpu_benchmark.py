"""The benchmark for GPUs: refused without one, planned by minutes, resumed; a rehearsal runs every part on the CPU."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as program
from benchmarks.gpu import checks, plan
from benchmarks.gpu.parts import PARTS, Setting
from benchmarks.gpu.plan import BROKEN, DONE, LATE, REFUSED, Part, Record, Row
from benchmarks.gpu.scale import REHEARSAL
from saccade.nn import ops
from saccade.nn.backends.triton_attention import VisionAttentionBackend

pytestmark = pytest.mark.ci
PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
FIRST, LONG, LAST = (Part(name, "", seconds) for name, seconds in (("first", 1), ("long", 100), ("last", 1)))


def test_missing_gpu_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu"])
    assert program.main() == 2
    assert "torch finds no CUDA device here" in capsys.readouterr().err


def test_parts_run_in_order_within_the_minutes_and_none_twice(tmp_path: Path) -> None:
    ran: list[str] = []

    def run(part: Part, limit: float) -> None:
        ran.append(part.name)
        assert limit <= plan.PATIENCE * part.seconds
        outcome = REFUSED if part is LAST else DONE
        Record("a", outcome, rows=[Row("step", "1.00 ms")]).write(tmp_path / f"{part.name}.json")

    records = dict(plan.go((FIRST, LONG, LAST), tmp_path, "a", 50, run))
    assert ran == ["first", "last"]
    assert [record.outcome for record in records.values()] == [DONE, LATE, REFUSED]
    assert "it takes about 100 s, and " in records[LONG].reason
    again = dict(plan.go((FIRST, LONG, LAST), tmp_path, "a", 150, run))
    assert ran == ["first", "last", "long"]
    assert [record.outcome for record in again.values()] == [DONE, DONE, REFUSED]
    assert again[FIRST].rows == [Row("step", "1.00 ms")]
    # Results of another commit or machine do not count.
    Record("a", BROKEN).write(tmp_path / "last.json")
    assert list(plan.go((FIRST, LAST), tmp_path, "a", 50, run))
    assert list(plan.go((FIRST,), tmp_path, "b", 50, run))
    assert ran == ["first", "last", "long", "last", "first"]


@pytest.mark.parametrize(
    ("code", "outcome", "reason"),
    [
        ("import os; os.abort()", BROKEN, "ended with status -6"),
        ("import time; time.sleep(60)", LATE, "ended after 0 s"),
        ("pass", BROKEN, "left no result"),
    ],
)
def test_a_part_that_dies_or_hangs_leaves_its_reason(tmp_path: Path, code: str, outcome: str, reason: str) -> None:
    run = plan.run_in_process([sys.executable, "-S", "-c", code], tmp_path, {})
    part = Part("one", "", 0)
    ((_, record),) = plan.go((part,), tmp_path, "a", 50, lambda part, _: run(part, 0.4 if outcome == LATE else 30))
    assert (record.outcome, record.is_final) == (outcome, False)
    assert reason in record.reason
    assert program.has_failed([record]) == (outcome == BROKEN)


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")  # rows of experts that nothing reads
def test_a_rehearsal_runs_every_part(tmp_path: Path) -> None:
    setting = Setting(REHEARSAL, tmp_path / "models")
    records = {part: program.run_part(part, setting, tmp_path / f"{part.name}.json", "a") for part in PARTS}
    refused = {part.name: record.reason for part, record in records.items() if record.outcome == REFUSED}
    assert refused == {"ranks": "this machine has fewer than two GPUs"}
    assert {record.outcome for record in records.values()} == {DONE, REFUSED}
    assert not program.has_failed(records.values())
    rows = {row.name: row for record in records.values() for row in record.rows}
    passed = {name for name, row in rows.items() if row.result == plan.PASSED}
    assert {
        "answers of the bundled model, triton on cpu", "experts, grouped_experts, bfloat16", "decoder, triton",
        "decoder, triton, CUDA graphs", "vision encoder, triton, 1 images", "vision encoder, triton, 2 images, CUDA graphs",
        "an image of 16 patches, the largest", "fp8 (e4m3 with a scale for each block) against its values",
        "compressed-tensors pack-quantized, 4 bits against its values", "modelopt NVFP4 against its values",
    } <= passed  # fmt: skip
    assert rows["decode step, 2 rows after 30 tokens, triton, CUDA graphs"].result.endswith(" ms")
    page = program.page({"cards": "none"}, records)
    assert "| decoder, triton, CUDA graphs | passed | differs by" in page
    assert "**refused**: this machine has fewer than two GPUs" in page


def test_a_wrong_backend_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = VisionAttentionBackend.packed

    def wrong(*arguments: Any, **options: Any) -> torch.Tensor:
        return right(*arguments, **options) * 2

    monkeypatch.setattr(VisionAttentionBackend, "packed", wrong)
    with torch.inference_mode():
        scale = dataclasses.replace(REHEARSAL, patches=(8,))
        found = list(checks.vision_backends(Setting(scale, tmp_path).load("2b", scale.patches), scale))
    failed = [row.name for row in found if row.result == plan.FAILED]
    assert failed == ["vision encoder, triton, 1 images", "vision encoder, triton, 1 images, CUDA graphs"]
    assert program.has_failed([Record("a", DONE, rows=found)])


def test_a_delta_rule_that_writes_a_state_before_it_is_read_fails() -> None:
    """FlashInfer's kernel asks for fresh rows of states, and the last one is the sequence's own."""
    plain = ops.PLAIN.gated_delta_rule

    def early(*arguments: Any) -> torch.Tensor:
        states, trail = arguments[4], arguments[-1]
        states.index_fill_(0, trail[:, -1], 0)
        return plain(*arguments)

    cpu = torch.device("cpu")
    for rule, result in ((plain, plan.PASSED), (early, plan.FAILED)):
        assert checks.over_the_first("rule", rule, cpu, torch.bfloat16).result == result


def test_every_operation_for_gpus_is_checked() -> None:
    names = {name for name, device_type, _ in {**ops.FASTER, **ops.OF_STATES} if device_type == "cuda"}
    assert names == {name for name, _ in checks.INPUTS}


def test_the_page_names_the_packages_that_it_imports() -> None:
    """A machine with a GPU may have no package index, and torch alone."""
    code = (
        "import json, sys; from importlib.metadata import packages_distributions as d; import benchmarks.gpu.__main__; "
        "n = d(); print(json.dumps(sorted({p for m in sys.modules if '.' not in m for p in n.get(m, [])})))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    named = PAGE.read_text().partition("imports the following packages.")[2].partition("##")[0].split()
    # structlog imports greenlet if it is there.
    own = {"saccade-vlm", "setuptools", "torch", "triton", "greenlet"}
    assert set(json.loads(found.stdout)) - own <= set(named)

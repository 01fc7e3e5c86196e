"""The benchmark for GPUs: refused without one; its checks, run on the CPU with a stand-in for graphs, find faults."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from captures import Again

from benchmarks.gpu import __main__ as program
from benchmarks.gpu import checks, subject, timings
from saccade.engine.config import EngineConfig
from saccade.nn.backends import PLAIN, Backend
from saccade.nn.backends.triton_attention import VisionAttentionBackend

pytestmark = pytest.mark.ci


ENTRIES = {PLAIN: Backend("saccade.nn.backends.torch_sdpa"), "triton": Backend("saccade.nn.backends.triton_attention")}


@pytest.fixture
def config(tiny_qwen3_vl: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    """A model whose checks run here: Triton's interpreter computes, and calls are captured by the stand-in."""

    def refusal(_: Any, backend: Any, cuts_encoder: bool) -> str | None:
        return None if backend.captures_packed else "declined"

    for module in (checks, timings):
        monkeypatch.setattr(module, "BACKENDS", ENTRIES)
        monkeypatch.setattr(module, "VISION_BACKENDS", ENTRIES)
        monkeypatch.setattr(module, "refusal", refusal)
    monkeypatch.setattr(checks, "ROWS", 2)
    monkeypatch.setattr(timings, "WARM", 0)
    monkeypatch.setattr(timings, "REPEATS", 1)
    monkeypatch.setattr("saccade.engine.executor.encoder_graphs.MAX_IMAGES", 4)
    monkeypatch.setattr(subject.load, "__defaults__", (Again(),))
    return EngineConfig(str(tiny_qwen3_vl), "tiny", device="cpu", dtype="float32")


def test_missing_gpu_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", "--model", "nowhere"])
    assert program.main() == 2
    assert "torch finds no CUDA device here" in capsys.readouterr().err
    assert not program.RESULTS.exists()


def test_every_check_and_time_is_on_the_page(config: EngineConfig) -> None:
    found, times = program.measure(config, [16], (1,))
    results = {check.name: check.result for check in found}
    assert results == {
        "decoder, torch_sdpa, CUDA graphs": "not run",
        "decoder, triton": "passed",
        "decoder, triton, CUDA graphs": "passed",
        "vision encoder, torch_sdpa, 1 images, CUDA graphs": "not run",
        "vision encoder, torch_sdpa: the host does not wait": "not run",
        "vision encoder, triton, 1 images": "passed",
        "vision encoder, triton, 1 images, CUDA graphs": "passed",
        "vision encoder, triton: the host does not wait": "not run",
    }
    assert not checks.has_failed(found)
    assert len(times) == 3 + 3
    page = program.report("a machine", "folder/tiny", found, times)
    assert "| decoder, triton, CUDA graphs | passed | differs by" in page
    assert "| encoding 1 images, triton, CUDA graphs |" in page


def test_a_wrong_backend_fails(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    right = VisionAttentionBackend.packed

    def wrong(*arguments: Any, **options: Any) -> torch.Tensor:
        return right(*arguments, **options) * 2

    monkeypatch.setattr(VisionAttentionBackend, "packed", wrong)
    with torch.inference_mode():
        found = list(checks.vision_backends(subject.load(config, [16])))
    failed = [check.name for check in found if check.result == checks.FAILED]
    assert failed == ["vision encoder, triton, 1 images", "vision encoder, triton, 1 images, CUDA graphs"]
    assert checks.has_failed(found)

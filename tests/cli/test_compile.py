"""`saccade compile` makes the kernels of a start, by the start's own code, and says which and where."""

import shutil
from collections.abc import Hashable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import published_products
import pytest
import starts
import torch
from checkpoints.quantised import quantise

from saccade.cli.flags import engine_config
from saccade.cli.main import run
from saccade.engine import compile_ahead
from saccade.engine.compile_ahead import StageLog
from saccade.engine.config import EngineConfig, EngineSettings
from saccade.engine.executor.execution import prepare_execution
from saccade.engine.executor.loader import load_model
from saccade.engine.executor.weight_filler import Progress
from saccade.nn.backends.compilers import Toolkit
from saccade.nn.backends.kernel_caches import kernel_caches
from saccade.nn.formats.deep_gemm_keys import Weights, kernel_of

HOPPER, NUM_SMS = (9, 0), 132
FLAGS = ["--dtype", "bfloat16", "--max-num-batched-tokens", "20000", "--encode-budget-patches", "256"]
"""More tokens than a step has by default, and than patches: more tokens need other kernels."""


class DeepGemm:
    """DeepGEMM, played: it notes the kernels that it *met*, and *compiled* those that its folder had not."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.met: set[Hashable] = set()
        self.compiled: list[Hashable] = []

    def product(self, x: torch.Tensor, weight: torch.Tensor, *, weight_scale: torch.Tensor) -> torch.Tensor:
        kernel = kernel_of(Weights(*weight.shape), len(x), NUM_SMS)
        self.met.add(kernel)
        name = "_".join(map(str, (*kernel.weights, *kernel[1:])))
        file = self._folder / "cache" / name / "nvcc_kernel.cubin"
        if not file.exists():
            self.compiled.append(kernel)
            file.parent.mkdir(parents=True)
            file.touch()
        return x.new_zeros(len(x), len(weight))


def begin(config: EngineConfig, progress: Progress = lambda *_: None) -> SimpleNamespace:
    """saccade.engine.startup.start, as far as it compiles products."""
    config.check()
    assert config.device in ("auto", "cuda")
    model = load_model(replace(config, device="cpu"), progress)
    execution = prepare_execution(config, starts.on_gpu(model), progress)
    description = SimpleNamespace(
        attention_backend=execution.backend.name,
        mm_encoder_attn_backend=execution.vision_backend.name,
        backend_reasons=execution.reasons,
    )
    return SimpleNamespace(description=description, close=lambda: None)


@pytest.fixture
def deep_gemm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DeepGemm:
    """On an H100 of which only starts know. All folders of libraries are empty."""
    for cache in kernel_caches():
        monkeypatch.setenv(cache.variable, str(tmp_path / cache.variable))
    published_products.install(monkeypatch, HOPPER)
    properties = SimpleNamespace(multi_processor_count=NUM_SMS)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: properties)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    subject = DeepGemm(tmp_path / "TRTLLM_DG_CACHE_DIR")
    fp8 = import_module("saccade.nn.formats.flashinfer_fp8")
    monkeypatch.setattr(fp8, "fp8_blockscale_gemm_sm90", subject.product)
    starts.install(monkeypatch)
    monkeypatch.setattr(compile_ahead, "start", begin)
    return subject


@pytest.fixture(params=["plain", "quantised"])
def model(request: pytest.FixtureRequest, tiny_qwen3_vl: Path, tmp_path: Path) -> tuple[Path, Path, list[str]]:
    """What is compiled ahead, what is started later, and their flags. Plain weights are not there ahead."""
    if request.param == "quantised":
        folder, _ = quantise(
            tiny_qwen3_vl, "fp8", lambda name: "language_model" in name and ".mlp." in name, tmp_path / "fp8", []
        )
        return folder, folder, FLAGS
    bare = shutil.copytree(tiny_qwen3_vl, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    return bare, tiny_qwen3_vl, [*FLAGS, "--quantization", "fp8"]


def test_a_start_after_it_meets_its_kernels_and_compiles_nothing(
    model: tuple[Path, Path, list[str]], deep_gemm: DeepGemm, capsys: pytest.CaptureFixture[str]
) -> None:
    ahead, later, flags = model
    assert run(["compile", str(ahead), *flags]) == 0
    made = list(deep_gemm.compiled)
    assert len(made) == len(set(made)) > 20
    shown = capsys.readouterr().out
    assert f"products of DeepGEMM: {len(made)}" in shown
    assert "attention: torch_sdpa" in shown
    deep_gemm.compiled.clear()
    deep_gemm.met.clear()
    quantization = "fp8" if "--quantization" in flags else None
    limits = {"max_num_batched_tokens": 20000, "encode_budget_patches": 256}
    settings = EngineSettings(dtype="bfloat16", quantization=quantization, **limits)
    begin(engine_config(str(later), later, settings))
    assert (deep_gemm.met, deep_gemm.compiled) == (set(made), [])


def test_it_says_that_nothing_was_missing(
    tiny_qwen3_vl: Path, deep_gemm: DeepGemm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It records no steps, whatever the flags."""
    recording = ["--record-steps", str(tmp_path / "steps"), "--record-pixels"]
    words = ["compile", str(tiny_qwen3_vl), *FLAGS, "--quantization", "fp8", *recording]
    assert run(words) == 0
    assert "compiles nothing" in capsys.readouterr().out
    assert run(words) == 0
    shown = capsys.readouterr().out
    assert "Nothing was compiled" in shown
    assert f"TRTLLM_DG_CACHE_DIR  products of DeepGEMM: {len(deep_gemm.compiled)}" in shown


def test_a_stage_has_its_seconds_and_what_it_added(deep_gemm: DeepGemm) -> None:
    lines: list[tuple[str, int, int]] = []
    clock = iter((0.0, 1.0, 3.0, 8.0))
    log = StageLog(lambda *line: lines.append(line), lambda: next(clock))
    x, weight = torch.zeros(1, 128), torch.zeros(128, 128)
    log("loading", 0, 1)
    log("loading", 1, 1)
    log("packing", 0, 0)
    deep_gemm.product(x, weight, weight_scale=x)
    deep_gemm.product(x, weight, weight_scale=x)
    log.end_stage()
    assert log.stages == [("loading", 2.0, {}), ("packing", 5.0, {"products of DeepGEMM": 1})]
    assert lines == [("loading", 0, 1), ("loading", 1, 1), ("packing", 0, 0)]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ([], "This machine lacks a GPU that torch finds"),
        ([], "nvcc (the CUDA toolkit), ninja. Run this command on one that has all"),
        (["--device", "cpu"], "--device cpu: this command is for GPUs"),
    ],
)
def test_without_a_gpu_it_says_what_is_missing(
    flags: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(compile_ahead, "find_toolkit", lambda: Toolkit(None, None, None, {}))
    assert run(["compile", *flags]) == 1
    assert sentence in capsys.readouterr().err

"""How a loaded model is computed on a device that this machine lacks."""

import dataclasses
from pathlib import Path

from structlog.testing import capture_logs

from saccade.engine.config import EngineConfig
from saccade.engine.executor.execution import decoder_workload, prepare_execution
from saccade.engine.executor.loader import load_model


def test_auto_looks_for_decodes_that_can_be_captured_with_cuda_graphs_alone(tiny_qwen3_vl: Path) -> None:
    config = EngineConfig(str(tiny_qwen3_vl), "tiny", device="cpu")
    model = load_model(config, lambda *_: None)
    for settings, is_captured in (
        ({}, False),
        ({"cuda_graphs": True}, True),
        # Then the refusal names the backend that was asked for.
        ({"cuda_graphs": True, "attention_backend": "flashinfer"}, False),
    ):
        workload = decoder_workload(dataclasses.replace(config, **settings), model)
        assert workload.is_captured == is_captured, settings


def test_a_start_warns_of_a_kv_cache_that_no_kernel_reads(tiny_qwen3_vl: Path) -> None:
    for cache, is_slow in (("auto", False), ("fp8", True)):
        config = EngineConfig(str(tiny_qwen3_vl), "tiny", device="cpu", kv_cache_dtype=cache)
        model = load_model(config, lambda *_: None)
        with capture_logs() as lines:
            execution = prepare_execution(config, model)
        assert ["no kernel reads" in line.get("reason", "") for line in lines] == [True] * is_slow, cache
        assert ("no kernel reads a KV cache in float8_e4m3fn" in execution.reasons[0]) == is_slow, cache

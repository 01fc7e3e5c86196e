"""Metrics live in a registry of their own."""

import math

import prometheus_client

from saccade.telemetry import ENGINE_STAGES, STAGES, Metrics


def test_stages_are_there_before_their_first_use() -> None:
    metrics = Metrics()
    with metrics.stage("hash"):
        pass
    counts = {
        stage: metrics.registry.get_sample_value("saccade_stage_seconds_count", {"stage": stage}) for stage in STAGES
    }
    assert counts == {stage: float(stage == "hash") for stage in STAGES}


def test_stages_of_the_engine_are_there_too() -> None:
    metrics = Metrics()
    metrics.answers.observe_engine("m", {"prefill": 2.0, "encode": 0.5, "decode": 0.25, "queue": math.nan})
    value = metrics.registry.get_sample_value
    sums = {stage: value("saccade_engine_stage_seconds_sum", {"stage": stage}) for stage in ENGINE_STAGES}
    assert sums == {"queue": 0.0, "encode": 0.5, "prefill": 2.0, "decode": 0.25}
    assert value("vllm:request_prefill_time_seconds_sum", {"model_name": "m"}) == 2.0
    assert value("vllm:request_inference_time_seconds_sum", {"model_name": "m"}) == 2.25


def test_nothing_is_registered_globally() -> None:
    Metrics()
    text = prometheus_client.generate_latest().decode()
    assert "saccade_" not in text
    assert "vllm:" not in text

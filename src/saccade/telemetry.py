"""A gateway's metrics.

A metric that means the same as one of vLLM's has the same name, so that vLLM's dashboards work; all other names begin
with `saccade_`. Labels contain no data that a client sent.
"""

import asyncio
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram

from saccade.metric_registry import MetricRegistry
from saccade.tracing.trace import TRACE

METRICS_CONTENT_TYPE = CONTENT_TYPE_LATEST

STAGES = ("fetch", "hash", "tokenize", "route", "queue", "decode", "preprocess", "write", "media", "prepare")
"""The stages of a request in the gateway. *media* covers all work on pixels, *prepare* everything before the
dispatch."""

ENGINE_STAGES = ("queue", "encode", "prefill", "decode")
"""The stages of a sample in the engine; *encode* is a part of *prefill*."""

PAUSES = ("read", "choices", "delta")
"""Work on the event loop whose longest piece is shown: a body is read, the choices of an answer are made, a delta of an
answer is written."""

LAG_INTERVAL_SECONDS = 0.05
MODEL = ("model_name",)

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKENS = tuple(2.0**power for power in range(18))
_SAMPLES = (1.0, 2.0, 5.0, 10.0, 20.0)
_SHORT_SECONDS = (0.0001, 0.00025, 0.0005, *_SECONDS[:10])


class AnswerMetrics:
    """Metrics of answers and their samples, recorded when these end."""

    def __init__(self, registry: CollectorRegistry) -> None:
        histogram = partial(Histogram, labelnames=MODEL, registry=registry)
        tokens, seconds = partial(histogram, buckets=_TOKENS), partial(histogram, buckets=_SECONDS)
        self.success_total = Counter(
            "vllm:request_success", "Finished samples by finish reason.", (*MODEL, "finished_reason"), registry=registry
        )
        self.prompt_tokens = tokens("vllm:request_prompt_tokens", "Number of tokens of a prompt.")
        self.generation_tokens = tokens("vllm:request_generation_tokens", "Number of tokens of a sample.")
        self.most_tokens = tokens(
            "vllm:request_max_num_generation_tokens", "Number of tokens of the longest sample of a request."
        )
        self.tpot_seconds = histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time between two tokens of a sample.",
            buckets=_SHORT_SECONDS,
        )
        self.asked_tokens = tokens("vllm:request_params_max_tokens", "Limit of generated tokens that a request sets.")
        self.asked_samples = histogram(
            "vllm:request_params_n", "Number of samples that a request asks for.", buckets=_SAMPLES
        )
        stages = seconds(
            "saccade_engine_stage_seconds", "Time of one stage of a sample in the engine.", labelnames=("stage",)
        )
        self._engine_stages = {stage: stages.labels(stage) for stage in ENGINE_STAGES}
        self._engine_seconds = {
            stage: seconds(f"vllm:request_{stage}_time_seconds", f"Time of a sample in the engine's stage {stage}.")
            for stage in ("queue", "prefill", "decode", "inference")
        }

    def observe_engine(self, model: str, seconds: Mapping[str, float]) -> None:
        """Record how many *seconds* a sample spent in each of ENGINE_STAGES, and in prefill and decode together.

        Impossible durations are left out, since NaN or infinity would stay in a sum forever.
        """
        for stage, spent in {**seconds, "inference": seconds["prefill"] + seconds["decode"]}.items():
            if not 0 <= spent < math.inf:
                continue
            if stage in self._engine_stages:
                self._engine_stages[stage].observe(spent)
            if stage in self._engine_seconds:
                self._engine_seconds[stage].labels(model).observe(spent)


class Metrics:
    """The metrics of one gateway process. Its engines' metrics are collected when `/metrics` is rendered."""

    def __init__(self) -> None:
        self.registry = registry = self.new_registry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        seconds = partial(Histogram, registry=registry, buckets=_SECONDS)
        short_seconds = partial(Histogram, registry=registry, buckets=_SHORT_SECONDS)
        self._failed_collectors = counter(
            "saccade_metric_collector_failures",
            "Times that the metrics of a collector were left out, because reading them failed.",
            ("collector",),
        )
        stages = short_seconds("saccade_stage_seconds", "Time of one stage of a request in the gateway.", ("stage",))
        self._stages = {stage: stages.labels(stage) for stage in STAGES}
        self.ttft_seconds = seconds(
            "vllm:time_to_first_token_seconds", "Time from the arrival of a request to its first token.", MODEL
        )
        self.itl_seconds = short_seconds(
            "vllm:inter_token_latency_seconds", "Time between two deltas of an answer.", MODEL
        )
        self.e2e_seconds = seconds(
            "vllm:e2e_request_latency_seconds", "Time from the arrival of a request to its last token.", MODEL
        )
        self.answers = AnswerMetrics(self.registry)
        self.images_by_hash = counter(
            "saccade_images_by_hash", "Images sent as their hash alone, because the worker was believed to hold them."
        )
        self.pixels_wanted = counter("saccade_pixels_wanted", "Images sent as their hash that the worker lacked.")
        self.requests_total = counter(
            "saccade_http_requests", "Answered requests by route and status.", ("route", "status")
        )
        self.slots_in_use = gauge("saccade_slots_in_use", "Shared-memory slots held by requests.")
        self.file_store_bytes = gauge("saccade_file_store_bytes", "Bytes of uploaded files that are kept.")
        self.requests_in_flight = gauge("saccade_requests_in_flight", "Requests being served.")
        self._lag = short_seconds("saccade_event_loop_lag_seconds", "Delay of a timer of the event loop.")

        pauses = gauge(
            "saccade_event_loop_longest_pause_seconds",
            "Longest time since the start that one piece of work held the event loop.",
            ("stage",),
        )
        self.longest_pauses = dict.fromkeys(PAUSES, 0.0)
        for stage in PAUSES:
            pauses.labels(stage).set_function(partial(self.longest_pauses.__getitem__, stage))

    def new_registry(self) -> MetricRegistry:
        """Return a registry that counts its collectors' failures in these metrics."""
        return MetricRegistry(lambda collector: self._failed_collectors.labels(collector).inc())

    def observe_stages(self, seconds: dict[str, float]) -> None:
        """Record how many *seconds* each stage took. The stages are some of STAGES, in order; the last ends now."""
        for stage, spent in seconds.items():
            self._stages[stage].observe(spent)
        if (trace := TRACE.get()) is not None:
            trace.add_stages(seconds)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Record how long the block takes as stage *name*."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.observe_stages({name: time.perf_counter() - start})

    def note_pause(self, stage: str, start: float) -> None:
        """Note that work of *stage*, one of PAUSES, has held the event loop since *start* (time.perf_counter)."""
        spent = time.perf_counter() - start
        if spent > self.longest_pauses[stage]:
            self.longest_pauses[stage] = spent

    async def watch_event_loop(self) -> None:
        """Record the event loop's lag at intervals, until cancelled."""
        while True:
            start = time.perf_counter()
            await asyncio.sleep(LAG_INTERVAL_SECONDS)
            self._lag.observe(max(0.0, time.perf_counter() - start - LAG_INTERVAL_SECONDS))

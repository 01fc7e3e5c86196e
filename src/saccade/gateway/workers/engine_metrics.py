"""The load that engines report, as metrics: collected from the fleet whenever the metrics are read."""

import itertools
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from saccade.gateway.workers.pool import WorkerPool
from saccade.protocol.engine_load import STEP_TOKEN_BOUNDS, Load

LABELS = ("model_name", "worker")
GAUGES = (
    ("vllm:num_requests_running", "Requests in the running batch.", "num_running"),
    ("vllm:num_requests_waiting", "Requests that wait for the engine.", "num_waiting"),
    ("saccade_kv_blocks", "KV blocks of the engine.", "num_blocks"),
    ("saccade_kv_blocks_free", "KV blocks that no running request holds.", "num_free_blocks"),
    ("saccade_encoder_cache_bytes", "Bytes of encoded images that are kept.", "encoder_cache_bytes"),
)
COUNTERS = (
    ("vllm:prompt_tokens", "Prompt tokens taken in.", "prompt_tokens_total"),
    ("vllm:generation_tokens", "Tokens generated.", "generated_tokens_total"),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prompt_tokens_total"),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", "cached_tokens_total"),
    ("vllm:num_preemptions", "Sequences put back to wait for room.", "preemptions_total"),
    ("saccade_engine_steps", "Steps of the engine.", "steps_total"),
    ("saccade_encoded_items", "Images that went through the vision encoder.", "encoded_items_total"),
    ("saccade_encoded_patches", "Patches that went through the vision encoder.", "encoded_patches_total"),
    ("saccade_kv_blocks_evicted", "Cached KV blocks that made room for others.", "evicted_blocks_total"),
    ("vllm:mm_cache_hits", "Images found in the encoder cache.", "encoder_cache_hits_total"),
)
CACHE_LABELS = ("block_size", "cache_dtype", "enable_prefix_caching", "gpu_memory_utilization", "num_gpu_blocks")
"""The labels of a KV cache; the names are vLLM's, on a CPU too."""

STEP_STAGES = ("schedule", "batch", "encode", "network", "postprocess")
"""Parts of a step's wall time; encode is the vision part of network."""


class FleetCollector(Collector):
    """Turns the last Load of every worker into samples; a worker that is away counts as idle."""

    def __init__(self, fleet: WorkerPool) -> None:
        self._fleet = fleet

    def collect(self) -> Iterable[Metric]:
        loads = {
            (client.description.model, client.url): client.load or Load()
            for client in self._fleet.clients
            if client.description is not None
        }
        for name, words, field in GAUGES:
            yield _filled(GaugeMetricFamily(name, words, labels=LABELS), loads, field)
        for name, words, field in COUNTERS:
            yield _filled(CounterMetricFamily(name, words, labels=LABELS), loads, field)
        lookups = CounterMetricFamily("vllm:mm_cache_queries", "Images looked up in the encoder cache.", labels=LABELS)
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", labels=LABELS)
        seconds = CounterMetricFamily("saccade_step_seconds", "Wall time of steps by stage.", labels=(*LABELS, "stage"))
        for labels, load in loads.items():
            usage.add_metric(labels, 1 - load.num_free_blocks / load.num_blocks if load.num_blocks else 0.0)
            lookups.add_metric(labels, load.encoder_cache_hits_total + load.encoded_items_total)
            for stage in STEP_STAGES:
                seconds.add_metric((*labels, stage), getattr(load, f"{stage}_seconds_total"))
        yield lookups
        yield usage
        yield seconds
        yield _step_tokens(loads)
        yield self._cache_info()
        ready = GaugeMetricFamily("saccade_worker_ready", "Whether the worker takes requests.", labels=("worker",))
        for client in self._fleet.clients:
            ready.add_metric((client.url,), float(client.ready))
        yield ready

    def _cache_info(self) -> GaugeMetricFamily:
        info = GaugeMetricFamily("vllm:cache_config_info", "What a KV cache is.", labels=(*LABELS, *CACHE_LABELS))
        for client in self._fleet.clients:
            if (said := client.description) is not None:
                dtype = said.kv_cache_dtype or said.dtype
                settings = (said.block_size, dtype, said.enable_prefix_caching, said.gpu_memory_utilization)
                info.add_metric((said.model, client.url, *map(str, (*settings, said.num_blocks))), 1.0)
        return info


def _step_tokens(loads: dict[tuple[str, str], Load]) -> HistogramMetricFamily:
    """Return how many tokens the steps computed, none for a worker that has not reported yet."""
    family = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens computed in a step.", labels=LABELS)
    bounds = [*(str(float(bound)) for bound in STEP_TOKEN_BOUNDS), "+Inf"]
    for labels, load in loads.items():
        counts = load.steps_by_tokens or (0,) * len(bounds)
        buckets = list(zip(bounds, map(float, itertools.accumulate(counts)), strict=True))
        family.add_metric(labels, buckets, load.step_tokens_total)
    return family


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily, loads: dict[tuple[str, str], Load], field: str
) -> GaugeMetricFamily | CounterMetricFamily:
    for labels, load in loads.items():
        family.add_metric(labels, getattr(load, field))
    return family

"""What the engines say of themselves, as metrics: collected from the fleet whenever somebody asks."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from saccade.gateway.workers import Fleet
from saccade.protocol.load import Load

LABELS = ("model_name", "worker")
GAUGES = (
    ("vllm:num_requests_running", "Requests in the running batch.", "num_running"),
    ("vllm:num_requests_waiting", "Requests that wait for the engine.", "num_waiting"),
    ("saccade_kv_blocks", "KV blocks of the engine.", "num_blocks"),
    ("saccade_kv_blocks_free", "KV blocks that no running request holds.", "num_free_blocks"),
    ("saccade_encoder_cache_bytes", "Bytes of encoded pictures that are kept.", "encoder_cache_bytes"),
)
COUNTERS = (
    ("vllm:prompt_tokens", "Prompt tokens taken in.", "prompt_tokens_total"),
    ("vllm:generation_tokens", "Tokens generated.", "generated_tokens_total"),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prompt_tokens_total"),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", "cached_tokens_total"),
    ("vllm:num_preemptions", "Sequences put back to wait for room.", "preemptions_total"),
    ("saccade_engine_steps", "Steps of the engine.", "steps_total"),
    ("saccade_encoded_items", "Pictures that went through the vision encoder.", "encoded_items_total"),
    ("saccade_encoded_patches", "Patches that went through the vision encoder.", "encoded_patches_total"),
    ("saccade_kv_blocks_evicted", "Cached KV blocks that made room for others.", "evicted_blocks_total"),
    ("vllm:mm_cache_hits", "Pictures found in the encoder cache.", "encoder_cache_hits_total"),
)
STEP_STAGES = ("schedule", "batch", "encode", "network", "postprocess")
"""Parts of a step's wall time; encode is the vision part of network."""


class FleetCollector(Collector):
    """Turns the last Load of every worker into samples; a worker that is away counts as idle."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterable[Metric]:
        """Yield every metric, one sample a worker."""
        loads = {
            (client.description.model, client.url): client.load or Load()
            for client in self._fleet.clients
            if client.description is not None
        }
        for name, words, field in GAUGES:
            yield _filled(GaugeMetricFamily(name, words, labels=LABELS), loads, field)
        for name, words, field in COUNTERS:
            yield _filled(CounterMetricFamily(name, words, labels=LABELS), loads, field)
        lookups = CounterMetricFamily(
            "vllm:mm_cache_queries", "Pictures looked up in the encoder cache.", labels=LABELS
        )
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
        ready = GaugeMetricFamily("saccade_worker_ready", "Whether the worker takes requests.", labels=("worker",))
        for client in self._fleet.clients:
            ready.add_metric((client.url,), float(client.ready))
        yield ready


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily, loads: dict[tuple[str, str], Load], field: str
) -> GaugeMetricFamily | CounterMetricFamily:
    for labels, load in loads.items():
        family.add_metric(labels, getattr(load, field))
    return family

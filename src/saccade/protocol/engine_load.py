"""Load: how busy an engine is, and its work so far. It is sent with deltas, at most a few times a second.

If metrics show a field, its annotation lists them.
"""

from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple, get_type_hints

import msgspec

STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of *steps_by_tokens*, as in vLLM."""


class EngineMetric(NamedTuple):
    """A metric that shows a field: its kind, name and description."""

    kind: Literal["gauge", "counter"]
    name: str
    words: str


class Sums(msgspec.Struct, kw_only=True):
    """Sums of an engine's work since its start.

    Names end in _total; those in _seconds_total are sums of wall-clock time. A step's time is the sum of schedule,
    batch, network and postprocess; *encode* is the vision encoder's part of network.
    """

    prompt_tokens_total: Annotated[
        int,
        EngineMetric("counter", "vllm:prompt_tokens", "Prompt tokens taken in."),
        EngineMetric("counter", "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    ] = 0
    generated_tokens_total: Annotated[int, EngineMetric("counter", "vllm:generation_tokens", "Tokens generated.")] = 0
    cached_tokens_total: Annotated[
        int, EngineMetric("counter", "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
    ] = 0
    preemptions_total: Annotated[
        int, EngineMetric("counter", "vllm:num_preemptions", "Sequences put back to wait for room.")
    ] = 0
    non_finite_requests_total: Annotated[
        int,
        EngineMetric(
            "counter", "saccade_non_finite_requests", "Requests for which the model computed NaN or infinity."
        ),
    ] = 0
    drafts_total: Annotated[
        int, EngineMetric("counter", "vllm:spec_decode_num_drafts", "Times that tokens were proposed for a sequence.")
    ] = 0
    draft_tokens_total: Annotated[
        int, EngineMetric("counter", "vllm:spec_decode_num_draft_tokens", "Tokens proposed.")
    ] = 0
    accepted_tokens_total: Annotated[
        int,
        EngineMetric(
            "counter", "vllm:spec_decode_num_accepted_tokens", "Proposed tokens that became part of an answer."
        ),
    ] = 0
    steps_total: Annotated[int, EngineMetric("counter", "saccade_engine_steps", "Steps of the engine.")] = 0
    step_tokens_total: int = 0
    encoded_items_total: Annotated[
        int, EngineMetric("counter", "saccade_encoded_items", "Images that went through the vision encoder.")
    ] = 0
    encoded_patches_total: Annotated[
        int, EngineMetric("counter", "saccade_encoded_patches", "Patches that went through the vision encoder.")
    ] = 0
    encoder_cache_hits_total: Annotated[
        int, EngineMetric("counter", "vllm:mm_cache_hits", "Images found in the encoder cache.")
    ] = 0
    schedule_seconds_total: float = 0.0
    batch_seconds_total: float = 0.0
    encode_seconds_total: float = 0.0
    network_seconds_total: float = 0.0
    postprocess_seconds_total: float = 0.0


class Load(Sums, frozen=True, kw_only=True):  # type: ignore[misc]  # msgspec freezes subclasses of mutable structs
    """A snapshot of an engine.

    *draining*: the worker finishes its requests and takes no new ones. *evicted_blocks_total* counts cached KV blocks
    that made room for others. Prompt tokens in cached blocks are recomputed if they lie between two recurrent states
    (*between_states_tokens_total*). They are also recomputed if a state or a window's block was evicted or had no room
    (*evicted_state_tokens_total*, *evicted_window_tokens_total*). *steps_by_tokens* is a histogram of steps by their
    number of tokens: one count for each of STEP_TOKEN_BOUNDS, and one for more.
    """

    num_running: Annotated[
        int, EngineMetric("gauge", "vllm:num_requests_running", "Requests in the running batch.")
    ] = 0
    num_waiting: Annotated[
        int, EngineMetric("gauge", "vllm:num_requests_waiting", "Requests that wait for the engine.")
    ] = 0
    num_waiting_tokens: Annotated[
        int,
        EngineMetric(
            "gauge", "saccade_prompt_tokens_waiting", "Prompt tokens that are not computed yet, of all requests."
        ),
    ] = 0
    draining: bool = False
    num_blocks: Annotated[int, EngineMetric("gauge", "saccade_kv_blocks", "KV blocks of the engine.")] = 0
    num_free_blocks: Annotated[
        int, EngineMetric("gauge", "saccade_kv_blocks_free", "KV blocks that no running request holds.")
    ] = 0
    steps_by_tokens: tuple[int, ...] = ()
    encoder_cache_bytes: Annotated[
        int, EngineMetric("gauge", "saccade_encoder_cache_bytes", "Bytes of encoded images that are kept.")
    ] = 0
    evicted_blocks_total: Annotated[
        int, EngineMetric("counter", "saccade_kv_blocks_evicted", "Cached KV blocks that made room for others.")
    ] = 0
    between_states_tokens_total: int = 0
    evicted_state_tokens_total: int = 0
    evicted_window_tokens_total: int = 0

    @property
    def encoder_lookups_total(
        self,
    ) -> Annotated[int, EngineMetric("counter", "vllm:mm_cache_queries", "Images looked up in the encoder cache.")]:
        """The number of images that were looked up in the encoder cache."""
        return self.encoder_cache_hits_total + self.encoded_items_total

    @property
    def kv_usage(
        self,
    ) -> Annotated[float, EngineMetric("gauge", "vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.")]:
        """The share of KV blocks in use, 0 to 1; 0 if there are none."""
        return 1 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0


def engine_metrics() -> Iterator[tuple[EngineMetric, str]]:
    """Yield each metric with the field or property of Load that it shows."""
    hints = get_type_hints(Load, include_extras=True)
    for name, value in vars(Load).items():
        if isinstance(value, property):
            hints[name] = get_type_hints(value.fget, include_extras=True)["return"]
    for name, hint in hints.items():
        for mark in getattr(hint, "__metadata__", ()):
            if isinstance(mark, EngineMetric):
                yield mark, name

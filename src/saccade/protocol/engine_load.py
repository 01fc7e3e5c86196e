"""Load: how busy an engine is and its work so far; sent with deltas, at most a few times a second."""

import msgspec

STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of *steps_by_tokens*, as in vLLM."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot. Names ending in _total only grow, from the engine's start; *_seconds_total are wall-clock sums.

    A step's wall time = schedule + batch + network + postprocess; *encode* is the vision part of network.
    *draining*: the worker finishes its requests and takes no new ones. *evicted_blocks_total* counts cached KV blocks
    that made room for others. Prompt tokens in cached blocks are computed again between two states of recurrent layers
    (*between_states_tokens_total*), and if a state, or a block of a window, was evicted or had no room
    (*evicted_state_tokens_total*, *evicted_window_tokens_total*). *steps_by_tokens* counts steps by their number of
    tokens: one count for each of STEP_TOKEN_BOUNDS, and one for more. *drafts_total* counts the times that tokens were
    proposed for a sequence. *non_finite_requests_total* counts requests for which the model computed NaN or infinity.
    """

    num_running: int = 0
    num_waiting: int = 0
    draining: bool = False
    num_blocks: int = 0
    num_free_blocks: int = 0
    steps_total: int = 0
    step_tokens_total: int = 0
    steps_by_tokens: tuple[int, ...] = ()
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generated_tokens_total: int = 0
    drafts_total: int = 0
    draft_tokens_total: int = 0
    accepted_tokens_total: int = 0
    encoded_items_total: int = 0
    encoded_patches_total: int = 0
    encoder_cache_hits_total: int = 0
    encoder_cache_bytes: int = 0
    preemptions_total: int = 0
    non_finite_requests_total: int = 0
    evicted_blocks_total: int = 0
    between_states_tokens_total: int = 0
    evicted_state_tokens_total: int = 0
    evicted_window_tokens_total: int = 0
    schedule_seconds_total: float = 0.0
    batch_seconds_total: float = 0.0
    encode_seconds_total: float = 0.0
    network_seconds_total: float = 0.0
    postprocess_seconds_total: float = 0.0

    @property
    def encoder_lookups_total(self) -> int:
        """The number of images that were looked up in the encoder cache."""
        return self.encoder_cache_hits_total + self.encoded_items_total

    @property
    def kv_usage(self) -> float:
        """The share of KV blocks in use, 0 to 1; 0 if there are none."""
        return 1 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0

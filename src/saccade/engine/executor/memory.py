"""Compute how many KV blocks and recurrent-state checkpoints fit, and allocate the caches."""

import gc
from bisect import bisect_right
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import replace
from fractions import Fraction
from functools import partial
from math import ceil, prod
from typing import NamedTuple

import structlog
import torch

from saccade.config import GIB
from saccade.engine.config import EngineConfig, Limits
from saccade.engine.executor.caches import BlockFormat, Caches, CacheSizes, specs_of_rank, state_dtype
from saccade.engine.executor.loader import LoadedModel
from saccade.errors import StartupError
from saccade.models.spec import KvSpec, ModelSpec, Paged, Recurrent, has_states, most_window_blocks, window_of
from saccade.nn.context import AttentionBackend

logger = structlog.get_logger(__name__)


def block_format(config: EngineConfig, model: LoadedModel) -> BlockFormat:
    """Return the format in which blocks store the keys, values and latents of *model*."""
    if config.kv_cache_dtype == "fp8":
        return BlockFormat(torch.float8_e4m3fn, model.kv_scales)
    return BlockFormat(model.network.dtype)


def limits(config: EngineConfig, model: LoadedModel) -> Limits:
    """Return a step's limits for *model*."""
    return config.limits(model.network.device.type, has_states=has_states(model.network.spec.kv_specs))


def may_capture(config: EngineConfig, model: LoadedModel) -> bool:
    """Return whether to run decodes as CUDA graphs if the model and backend allow it: by default, only on a GPU."""
    return model.network.device.type == "cuda" if config.cuda_graphs is None else config.cuda_graphs


def kv_specs_of(model: LoadedModel) -> tuple[KvSpec, ...]:
    """Return the KvSpec of each layer on this rank."""
    return specs_of_rank(model.network.spec.kv_specs, model.ranks.attention)


def bytes_of_block(config: EngineConfig, model: LoadedModel) -> int:
    """Return the size in bytes of one block on this rank."""
    return block_bytes(kv_specs_of(model), config.block_size, block_format(config, model).dtype)


def block_bytes(kv_specs: Ordered[KvSpec], block_size: int, dtype: torch.dtype) -> int:
    """Return the size in bytes of one block, whose values have *dtype*, over all layers that have blocks."""
    values = sum(kv_spec.token_values for kv_spec in kv_specs if not isinstance(kv_spec, Recurrent))
    return values * block_size * dtype.itemsize


def num_window_blocks(spec: ModelSpec, block_size: int, num_blocks: int) -> int:
    """Return how many blocks layers with a window have if the others have *num_blocks*; 0 without such layers.

    Their number is four fifths of what every layer would get if all layers had the same number in the same memory. So
    short sequences, which need equally many blocks of both kinds, have a fifth less room; long ones have more. There
    are at least enough for two sequences to go on at the same time, unless the other layers have fewer.
    """
    if (window := window_of(spec.kv_specs)) is None:
        return 0
    least = 2 * most_window_blocks(window, block_size, spec.longest_whole)
    return min(num_blocks, max(int(num_blocks * _window_share(spec)), least))


def least_blocks(spec: ModelSpec, num_blocks: int) -> int:
    """Return how many blocks the other layers need so that layers with a window have *num_blocks*."""
    return num_blocks if window_of(spec.kv_specs) is None else ceil(num_blocks / _window_share(spec))


def _window_share(spec: ModelSpec) -> Fraction:
    of_window, of_others = (
        sum(one.token_values for one in spec.kv_specs if not isinstance(one, Recurrent) and _has_window(one) == which)
        for which in (True, False)
    )
    return Fraction(4 * of_others, 5 * of_others + of_window)


def pool_bytes(config: EngineConfig, model: LoadedModel, num_blocks: int) -> int:
    """Return the size in bytes of a pool of *num_blocks* on this rank.

    This includes the blocks of layers with a window, and state checkpoints that grow with the pool.
    """
    counts = {False: num_blocks, True: num_window_blocks(model.network.spec, config.block_size, num_blocks)}
    dtype = block_format(config, model).dtype
    return num_blocks * checkpoint_bytes_a_block(config, model) + sum(
        counts[_has_window(one)] * block_bytes([one], config.block_size, dtype) for one in kv_specs_of(model)
    )


def _has_window(kv_spec: KvSpec) -> bool:
    return isinstance(kv_spec, Paged) and kv_spec.window is not None


def state_bytes(kv_specs: Ordered[KvSpec], dtype: torch.dtype) -> int:
    """Return the size in bytes of one sequence's recurrent states, over all layers that have them."""
    return sum(
        prod(shape) * state_dtype(name, dtype).itemsize
        for kv_spec in kv_specs
        if isinstance(kv_spec, Recurrent)
        for shape, name in zip(kv_spec.shapes, kv_spec.dtypes, strict=True)
    )


def checkpoint_bytes_a_block(config: EngineConfig, model: LoadedModel) -> int:
    """Return the bytes of state checkpoints to keep for each block of a GPU's KV cache; 0 if a setting fixes them.

    This pays for a checkpoint every *state_snapshot_blocks* blocks, but never exceeds the bytes of the block itself. So
    if the cache holds a prompt, it probably holds a state to resume from, too. The result is also 0 on a CPU and
    without prefix caching.
    """
    settings = (config.state_snapshot_bytes, config.num_state_snapshots, config.kv_cache_bytes)
    if model.network.device.type == "cpu" or settings != (None, None, None) or not config.enable_prefix_caching:
        return 0
    size = state_bytes(kv_specs_of(model), model.network.dtype)
    return min(-(-size // config.state_snapshot_blocks), bytes_of_block(config, model))


def num_state_checkpoints(
    config: EngineConfig, kv_specs: Ordered[KvSpec], dtype: torch.dtype, default_bytes: int = GIB
) -> int:
    """Return how many checkpoints of recurrent states to keep; 0 without such states or without prefix caching."""
    size = state_bytes(kv_specs, dtype)
    if not (size and config.enable_prefix_caching):
        return 0
    if config.num_state_snapshots is not None:
        return config.num_state_snapshots
    count = (default_bytes if config.state_snapshot_bytes is None else config.state_snapshot_bytes) // size
    if config.state_snapshot_bytes and not count:
        logger.warning(
            "prefixes are not reused: --state-snapshot-bytes is less than one snapshot",
            state_snapshot_bytes=config.state_snapshot_bytes,
            snapshot_bytes=size,
        )
    return count


class Measured(NamedTuple):
    """Corrections to torch's peak memory: it includes *num_blocks* blocks of the pool, and misses *outside* bytes."""

    num_blocks: int = 0
    outside: int = 0


NOTHING = Measured()


def measured(config: EngineConfig, model: LoadedModel, backend: AttentionBackend, num_blocks: int) -> Measured:
    """Return the corrections to a measurement in a pool of *num_blocks*, which is too small for a long context."""
    return Measured(num_blocks, prefix_bytes(config, model) if backend.copies_prefixes else 0)


def prefix_bytes(config: EngineConfig, model: LoadedModel) -> int:
    """Return the size in bytes of a layer's copy of the longest context, which a chunk after a prefix attends to."""
    kv_specs = kv_specs_of(model)
    paged = (kv_spec for kv_spec in kv_specs if not (isinstance(kv_spec, Recurrent) or _has_window(kv_spec)))
    values = max((kv_spec.token_values for kv_spec in paged), default=0)
    dtype, cached = model.network.dtype, block_format(config, model).dtype
    # Another number format needs a copy in that format and one in float32.
    num_bytes = dtype.itemsize if cached == dtype else dtype.itemsize + cached.itemsize + torch.float32.itemsize
    return values * num_bytes * wanted_length(config, model)


def wanted_length(config: EngineConfig, model: LoadedModel) -> int:
    """Return the length of the longest sequence to serve, if the pool holds it."""
    return config.max_model_len or model.network.spec.max_position_embeddings


def num_blocks(
    config: EngineConfig,
    bytes_of: Callable[[int], int],
    most: int,
    device: torch.device,
    measured: Measured = NOTHING,
) -> int:
    """Return the number of blocks in the pool.

    *bytes_of* maps a number of blocks to bytes; no more than *most* are of use. Raises StartupError if there is no room
    for one block. On CUDA, call this after a warm-up at full size with all recurrent states. Torch's peak memory,
    corrected by *measured*, is then taken as the memory that everything except the pool needs. On other devices,
    recurrent states are not part of the pool's budget.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    if config.kv_cache_bytes is not None:
        budget = config.kv_cache_bytes
    elif device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        outside = total - free - torch.cuda.memory_reserved(device)
        need = torch.cuda.max_memory_reserved(device) - bytes_of(measured.num_blocks) + measured.outside
        used = outside + need + config.encoder_cache_bytes
        budget = int(total * config.gpu_memory_utilization) - used
    else:
        budget = GIB
    blocks = bisect_right(range(1, most + 1), budget, key=bytes_of)
    if blocks < 1:
        raise StartupError(
            f"No memory is left for the KV cache: {max(0, budget)} bytes, and one block takes {bytes_of(1)}. "
            "Lower --max-num-batched-tokens or --encode-budget-patches, or raise --gpu-memory-utilization or "
            "--kv-cache-memory-bytes."
        )
    return blocks


def fitting_blocks(config: EngineConfig, model: LoadedModel, measured: Measured = NOTHING) -> int:
    """Return how many blocks fit on this rank's device with the loaded *model*. Raises StartupError."""
    most = limits(config, model).max_num_seqs * -(-wanted_length(config, model) // config.block_size)
    # Without images, nothing fills the encoder cache.
    sized = config if model.network.spec.takes_media else replace(config, encoder_cache_bytes=0)
    return num_blocks(sized, partial(pool_bytes, config, model), most, model.network.device, measured)


def allocate(config: EngineConfig, model: LoadedModel, num_blocks: int) -> Caches:
    """Return this rank's caches of *model*. On CUDA, unused memory is released first."""
    network = model.network
    if network.device.type == "cuda":
        # The collector is off during a start, and torch's free memory may be in pieces too small for a cache.
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(network.device)
    kv_specs, default = kv_specs_of(model), num_blocks * checkpoint_bytes_a_block(config, model) or GIB
    checkpoints = num_state_checkpoints(config, kv_specs, network.dtype, default)
    num_padding = int(may_capture(config, model))
    num_kept = config.speculation.num_tokens if config.speculation else 0
    num_rows = limits(config, model).max_num_seqs
    in_window = num_window_blocks(network.spec, config.block_size, num_blocks)
    sizes = CacheSizes(num_blocks, config.block_size, num_rows, checkpoints, num_padding, num_kept, in_window)
    return Caches(kv_specs, sizes, network.dtype, network.device, block_format(config, model))


def model_length(config: EngineConfig, max_position_embeddings: int, blocks: int) -> int:
    """Return the length of the longest sequence, prompt and answer. Raises StartupError if the pool cannot hold it."""
    capacity = blocks * config.block_size
    if config.max_model_len is None:
        return min(max_position_embeddings, capacity)
    if config.max_model_len > capacity:
        raise StartupError(
            f"--max-model-len is {config.max_model_len}, but the KV cache holds {capacity} tokens ({blocks} blocks). "
            "Lower --max-model-len, or give the KV cache more memory with --kv-cache-memory-bytes."
        )
    return config.max_model_len

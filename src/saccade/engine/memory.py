"""How large the KV pool becomes."""

from math import prod

import numpy as np
import torch

from saccade.engine.config import GIB, EngineConfig
from saccade.errors import StartupError
from saccade.nn.context import KvCache, KvSpec

KvCaches = list[KvCache]
"""The paged caches of all layers."""


def block_bytes(spec: KvSpec, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block over all layers, keys and values."""
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * block_size * dtype.itemsize


def num_blocks(config: EngineConfig, bytes_per_block: int, model_len: int, device: torch.device) -> int:
    """Return how many blocks the pool gets. *model_len* is the longest sequence wanted. Raises StartupError.

    On CUDA, call it after a warm-up at full size: what torch holds at its peak is taken as the network's need.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    if config.kv_cache_bytes is not None:
        budget = config.kv_cache_bytes
    elif device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        outside = total - free - torch.cuda.memory_reserved(device)
        used = outside + torch.cuda.max_memory_reserved(device) + config.encoder_cache_bytes
        budget = int(total * config.gpu_memory_utilization) - used
    else:
        budget = GIB
    wanted = config.max_num_seqs * -(-model_len // config.block_size)
    blocks = min(budget // bytes_per_block, wanted)
    if blocks < 1:
        raise StartupError(
            f"No memory is left for the KV cache: {max(0, budget)} bytes, and one block takes {bytes_per_block}. "
            "Lower max_num_batched_tokens or encode_budget_patches, or raise gpu_memory_utilization or kv_cache_bytes."
        )
    return blocks


def model_length(config: EngineConfig, max_position_embeddings: int, blocks: int) -> int:
    """Return the longest sequence, prompt and answer, that is served. Raises StartupError where it cannot be held."""
    capacity = blocks * config.block_size
    if config.max_model_len is None:
        return min(max_position_embeddings, capacity)
    if config.max_model_len > capacity:
        raise StartupError(
            f"--max-model-len is {config.max_model_len}, but the KV cache holds {capacity} tokens ({blocks} blocks). "
            "Lower --max-model-len, or give the KV cache more memory with --kv-cache-memory-bytes."
        )
    return config.max_model_len


def allocate(spec: KvSpec, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> KvCaches:
    """Return zeroed caches, one per layer."""
    shape = (2, blocks, block_size, spec.num_kv_heads, spec.head_dim)
    return [KvCache(*_zeros(shape, dtype, device).unbind(0)) for _ in range(spec.num_layers)]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy asks the system for pages that are zero anyway, so memory is taken as it is used; torch would write it all.
    return torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)

"""From a config to a warm engine."""

import os
from importlib.metadata import PackageNotFoundError, version
from math import isqrt

import torch

from saccade.engine import memory, warmup
from saccade.engine.admission import Admission
from saccade.engine.block_manager import BlockManager, PagedBlocks
from saccade.engine.config import EngineConfig
from saccade.engine.encoder_cache import EncoderCache
from saccade.engine.loader import LoadedModel, Progress, load_model
from saccade.engine.loop import Engine
from saccade.engine.runner import ModelRunner
from saccade.engine.scheduler import Budgets, Scheduler
from saccade.nn.backends import load_backend
from saccade.protocol.description import Description
from saccade.transport.shared_memory import namespace


def start(config: EngineConfig, progress: Progress) -> Engine:
    """Load the model, size the KV pool, warm up, and return an engine that is ready. Raises StartupError."""
    config.check()
    torch.set_num_threads(_num_threads(config))
    progress("reading the model's files", 0, 0)
    model = load_model(config, progress)
    device: torch.device = next(model.network.parameters()).device
    if device.type == "cuda":
        progress("measuring memory", 0, 0)
        _use_all_memory(config, model)
    progress("warming up", 0, 0)
    caches = _allocate(config, model, _num_blocks(config, model))
    warmup.run(_assemble(config, model, caches), num_text_tokens=2 * config.block_size + 1)
    return _assemble(config, model, caches)


def _num_threads(config: EngineConfig) -> int:
    """Return the configured threads, else OMP_NUM_THREADS, else one less than there are cores.

    OpenMP's threads spin while they wait for one another: on every core, they would starve gateway, front and decode
    processes, and be starved by them.
    """
    if config.threads is not None:
        return config.threads
    if "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    return max(1, len(os.sched_getaffinity(0)) - 1)


def _num_blocks(config: EngineConfig, model: LoadedModel) -> int:
    network = model.network
    parameter = next(network.parameters())
    bytes_per_block = memory.block_bytes(network.kv_spec, config.block_size, parameter.dtype)
    wanted = config.max_model_len or network.max_position_embeddings
    return memory.num_blocks(config, bytes_per_block, wanted, parameter.device)


def _allocate(config: EngineConfig, model: LoadedModel, num_blocks: int) -> memory.KvCaches:
    parameter = next(model.network.parameters())
    return memory.allocate(model.network.kv_spec, num_blocks, config.block_size, parameter.dtype, parameter.device)


def _use_all_memory(config: EngineConfig, model: LoadedModel) -> None:
    """Run a step as large as the budgets allow, so that torch's peak is known before the KV pool takes the rest."""
    merge = model.network.merge_size
    side = max(merge, isqrt(config.encode_budget_patches) // merge * merge)
    num_text_tokens = config.max_num_batched_tokens
    num_tokens = num_text_tokens + model.network.item_tokens((1, side, side)) + config.block_size
    caches = _allocate(config, model, -(-num_tokens // config.block_size) + 1)
    warmup.run(_assemble(config, model, caches), num_text_tokens, side)


def _assemble(config: EngineConfig, model: LoadedModel, caches: memory.KvCaches) -> Engine:
    num_blocks = caches[0].keys.shape[0]
    max_model_len = memory.model_length(config, model.network.max_position_embeddings, num_blocks)
    encoder_cache: EncoderCache[torch.Tensor] = EncoderCache(config.encoder_cache_bytes)
    runner = ModelRunner(model.network, load_backend(config.attention_backend), encoder_cache)
    runner.use_caches(caches, config.block_size)
    groups = [PagedBlocks(num_blocks, config.block_size)]
    block_manager = BlockManager(groups, config.block_size, config.enable_prefix_caching)
    budgets = Budgets(
        config.max_num_seqs, config.max_num_batched_tokens, config.encode_budget_patches, config.max_num_waiting
    )
    description = Description(
        model=config.model,
        fingerprint=model.fingerprint,
        files=model.files,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        block_size=config.block_size,
        num_blocks=num_blocks,
        dtype=str(runner.dtype).removeprefix("torch."),
        device=str(runner.device),
        shm_namespace=namespace(),
        version=_version(),
    )
    admission = Admission(model.network, model.fingerprint, max_model_len)
    return Engine(runner, Scheduler(budgets, block_manager, encoder_cache), admission, description)


def _version() -> str:
    try:
        return version("saccade")
    except PackageNotFoundError:
        return "unknown"

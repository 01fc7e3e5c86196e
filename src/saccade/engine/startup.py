"""From a config to a warm engine."""

import dataclasses
from math import isqrt

import torch

from saccade.engine import memory, warmup
from saccade.engine.admission import Admission
from saccade.engine.block_manager import BlockManager, PagedBlocks
from saccade.engine.config import EngineConfig
from saccade.engine.description import describe
from saccade.engine.encoder_cache import EncoderCache
from saccade.engine.execution import Execution, prepare
from saccade.engine.loader import LoadedModel, Progress, load_model
from saccade.engine.loop import Engine
from saccade.engine.runner import ModelRunner
from saccade.engine.scheduler import Budgets, Scheduler


def start(config: EngineConfig, progress: Progress) -> Engine:
    """Load the model, size the KV pool, warm up, and return an engine that is ready. Raises StartupError."""
    config.check()
    progress("reading the model's files", 0, 0)
    model = load_model(config, progress)
    execution = prepare(config, model)
    if model.device.type == "cuda":
        progress("measuring memory", 0, 0)
        _use_all_memory(config, model, execution)
    progress("warming up", 0, 0)
    caches = _allocate(config, model, _num_blocks(config, model))
    warmup.run(_assemble(config, model, execution, caches), num_text_tokens=2 * config.block_size + 1)
    return _assemble(config, model, execution, caches)


def _encode_budget(config: EngineConfig, model: LoadedModel) -> int:
    """Return the patches that a step may encode."""
    if config.encode_budget_patches is not None:
        return config.encode_budget_patches
    return 1024 if model.device.type == "cpu" else 16384


def _num_blocks(config: EngineConfig, model: LoadedModel) -> int:
    network = model.network
    bytes_per_block = memory.block_bytes(network.kv_spec, config.block_size, model.dtype)
    wanted = config.max_model_len or network.max_position_embeddings
    return memory.num_blocks(config, bytes_per_block, wanted, model.device)


def _allocate(config: EngineConfig, model: LoadedModel, num_blocks: int) -> memory.KvCaches:
    return memory.allocate(model.network.kv_spec, num_blocks, config.block_size, model.dtype, model.device)


def _use_all_memory(config: EngineConfig, model: LoadedModel, execution: Execution) -> None:
    """Run a step as large as the budgets allow, so that torch's peak is known before the KV pool takes the rest."""
    merge = model.network.merge_size
    side = max(merge, isqrt(_encode_budget(config, model)) // merge * merge)
    num_text_tokens = config.max_num_batched_tokens
    num_tokens = num_text_tokens + model.network.item_tokens((1, side, side)) + config.block_size
    caches = _allocate(config, model, -(-num_tokens // config.block_size) + 1)
    # This pool holds one step, not the context that is wanted of the one that follows.
    config = dataclasses.replace(config, max_model_len=None)
    warmup.run(_assemble(config, model, execution, caches), num_text_tokens, side)


def _assemble(config: EngineConfig, model: LoadedModel, execution: Execution, caches: memory.KvCaches) -> Engine:
    num_blocks = caches[0].keys.shape[0]
    max_model_len = memory.model_length(config, model.network.max_position_embeddings, num_blocks)
    encoder_cache: EncoderCache[torch.Tensor] = EncoderCache(config.encoder_cache_bytes)
    runner = ModelRunner(model.network, execution.backend, encoder_cache, execution.threads)
    runner.use_caches(caches, config.block_size)
    groups = [PagedBlocks(num_blocks, config.block_size, keep_contents=config.kv_events_token_ids)]
    block_manager = BlockManager(groups, config.block_size, config.enable_prefix_caching)
    budgets = Budgets(
        config.max_num_seqs,
        config.max_num_batched_tokens,
        _encode_budget(config, model),
        config.max_num_waiting,
        encode_aside=model.device.type == "cpu" and execution.threads.aside > 0,
    )
    description = describe(config, model, runner, max_model_len, num_blocks)
    admission = Admission(model.network, model.fingerprint, max_model_len)
    return Engine(runner, Scheduler(budgets, block_manager, encoder_cache), admission, description)

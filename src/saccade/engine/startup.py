"""Starts an engine from a config: loads the model on every rank, sizes the caches, and warms up."""

import dataclasses
from functools import partial
from pathlib import Path

import msgspec

from saccade.engine import warmup
from saccade.engine.config import EngineConfig
from saccade.engine.core.encoder_cache import EncoderCache
from saccade.engine.core.encoder_scheduler import EncodeCosts
from saccade.engine.core.grammars import Grammars
from saccade.engine.core.kv.blocks import PagedBlocks
from saccade.engine.core.kv.manager import BlockManager
from saccade.engine.core.kv.state_checkpoints import StateCheckpoints
from saccade.engine.core.kv.window_blocks import WindowBlocks
from saccade.engine.core.kv_receiver import KvReceiver
from saccade.engine.core.kv_sender import KvSender
from saccade.engine.core.request_validation import MediaMemory, RequestValidator
from saccade.engine.core.schedule import Budgets
from saccade.engine.core.scheduler import Scheduler
from saccade.engine.core.speculation import Speculation
from saccade.engine.executor import memory
from saccade.engine.executor.caches import Caches
from saccade.engine.executor.execution import (
    Execution,
    check_encoder_cache,
    largest_image,
    most_patches,
    prepare_execution,
)
from saccade.engine.executor.fingerprint import model_fingerprint
from saccade.engine.executor.loader import LoadedModel, load_model
from saccade.engine.executor.local import LocalExecutor
from saccade.engine.executor.model_runner import make_runner
from saccade.engine.executor.ranks.peers import Peers, closed_on_failure, ranks_of
from saccade.engine.executor.weight_filler import Progress
from saccade.engine.loop import Engine
from saccade.engine.recording import Header, Machine, Recorder, recording_folder
from saccade.engine.self_description import describe, describe_machine, kv_form
from saccade.engine.vocabulary import has_vocabulary, read_vocabulary
from saccade.errors import StartupError
from saccade.models.files import read_model_files, with_overrides
from saccade.models.spec import Grid, ModelSpec, window_of
from saccade.transport.kv_transfer.service import KvTransfers, TransferConfig


def start(config: EngineConfig, progress: Progress) -> Engine:
    """Load the model, size the KV pool, warm up, and return the engine, ready for use. Raises StartupError."""
    config.check()
    if config.record_steps is not None:
        recording_folder(config)
    progress("reading the model's files", 0, 0)
    with closed_on_failure(Peers(ranks_of(config))) as peers:
        peers.start(config)
        model = load_model(config, progress, peers.ranks)
        grammars = _grammars(config, model)
        execution = prepare_execution(config, model, progress)
        check_encoder_cache(config, model)
        if peers.ranks.size > 1:
            progress("waiting for the other ranks", 0, 0)
        peers.join(model.network.device)
        for done, total in execution.capture_encoder():
            progress("capturing CUDA graphs of the vision encoder", done, total)
        measured, limits, grid = memory.NOTHING, None, None
        if model.network.device.type == "cuda":
            progress("measuring memory", 0, 0)
            if model.network.spec.takes_media:
                patches = most_patches(config, model)
                grid = measured_grid(model, patches)
                limits = media_memory(config, model, patches)
            measured = measure(config, model, execution, peers, grid)
        progress("warming up", 0, 0)
        caches = allocate(config, model, peers=peers, measured=measured)
        warm = assemble(_to_warm_up(config), model, execution, caches, peers)
        warmup.run_warmup(warm, num_text_tokens=2 * config.block_size + 1)
        return assemble(config, model, execution, caches, peers, progress, grammars, limits)


def _to_warm_up(config: EngineConfig) -> EngineConfig:
    """Return settings for the engines that run steps during the start."""
    return dataclasses.replace(
        config, record_steps=None, cuda_graphs=False, role="both", kv_transfer_bind=None, max_inter_token_latency=0
    )


def fresh_engine(header: Header, changes: dict[str, str]) -> tuple[Engine, Machine]:
    """Return an engine with the EngineConfig in *header*, apart from *changes*, and the machine that it runs on.

    Raises StartupError if the engine cannot be created, or if the model folder holds other weights.
    """
    recorded = dataclasses.replace(header.config, record_steps=None, record_pixels=False)
    config: EngineConfig = dataclasses.replace(recorded, **changes)  # type: ignore[arg-type]
    folder = Path(config.model_dir)
    if not folder.is_dir():
        raise StartupError(f"The model folder {folder} of the recording does not exist. Name another with --model.")
    # A replay may change settings that the fingerprint depends on.
    recorded = dataclasses.replace(recorded, model_dir=config.model_dir)
    files = with_overrides(
        *(read_model_files(folder), config.hf_overrides, config.override_generation_config, config.generation_config),
        config.model_impl,
    )
    if model_fingerprint(recorded, files) != header.machine.weights:
        raise StartupError(f"{folder} holds other weights or files than the model of the recording.")
    engine = start(config, lambda *_: None)
    return engine, describe_machine(engine.description, header.machine.num_threads)


def allocate(
    config: EngineConfig,
    model: LoadedModel,
    num_blocks: int | None = None,
    peers: Peers | None = None,
    measured: memory.Measured = memory.NOTHING,
) -> Caches:
    """Return the caches of *model* with *num_blocks* blocks, and make *peers* allocate theirs.

    None stands for as many blocks as fit on every rank; *measured* corrects this rank's measurement.
    """
    if num_blocks is None:
        num_blocks = memory.fitting_blocks(config, model, measured)
        num_blocks = num_blocks if peers is None else peers.least_blocks(num_blocks)
    if peers is not None:
        peers.allocate(num_blocks)
    return memory.allocate(config, model, num_blocks)


def largest_grid(spec: ModelSpec, budget_patches: int) -> Grid:
    """Return the grid of a square image that is within the budget and fits into a sequence, as run_warmup() needs."""
    grid = spec.square_grid(budget_patches)
    while budget_patches and spec.item_tokens(grid) + warmup.NUM_OTHER_TOKENS >= spec.max_position_embeddings:
        budget_patches = budget_patches * 7 // 8
        grid = spec.square_grid(budget_patches)
    return grid


def measured_grid(model: LoadedModel, num_patches: int) -> Grid:
    """Return the grid of the image to measure: a square of *num_patches*, or the largest image if it has more features.

    The image fits into a sequence.
    """
    spec, image = model.network.spec, largest_image(model).grid
    fits = spec.item_tokens(image) + warmup.NUM_OTHER_TOKENS < spec.max_position_embeddings
    square = largest_grid(spec, num_patches)
    return max(square, image if fits else square, key=spec.encoder_output_values)


def media_memory(config: EngineConfig, model: LoadedModel, num_patches: int) -> MediaMemory:
    """Return the memory that `measure` has reserved for media: for *num_patches* and the largest image's features."""
    itemsize = model.network.dtype.itemsize
    of_image = model.network.spec.encoder_output_values(measured_grid(model, num_patches)) * itemsize
    return MediaMemory(num_patches, max(config.encoder_cache_bytes, of_image), itemsize)


def measure(
    config: EngineConfig, model: LoadedModel, execution: Execution, peers: Peers, grid: Grid | None
) -> memory.Measured:
    """Run the largest possible steps, so that torch's peak memory is known before the KV pool is sized.

    One step has as many tokens as the budget allows. One encodes an image with *grid*, unless the model reads only
    text, and one draws tokens for all rows. The caches of these steps are then released; other ranks replace theirs.
    """
    limits = memory.limits(config, model)
    num_text_tokens = limits.max_num_batched_tokens + model.network.spec.longest_whole
    num_image_tokens = 0 if grid is None else model.network.spec.item_tokens(grid)
    num_tokens = num_text_tokens + num_image_tokens + config.block_size
    # Every row has a block, and the scheduler leaves one free for each row that it has begun.
    num_blocks = max(-(-num_tokens // config.block_size) + 1, 2 * limits.max_num_seqs)
    num_blocks = memory.least_blocks(model.network.spec, num_blocks)
    # This pool holds one step only; the context length applies to the engine that follows.
    small = dataclasses.replace(
        _to_warm_up(config),
        max_model_len=None,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=num_text_tokens,
    )
    caches = allocate(config, model, num_blocks, peers)
    warmup.run_warmup(assemble(small, model, execution, caches, peers), num_text_tokens, grid, limits.max_num_seqs)
    return memory.measured(config, model, execution.backend, num_blocks)


def assemble(
    config: EngineConfig,
    model: LoadedModel,
    execution: Execution,
    caches: Caches,
    peers: Peers | None = None,
    progress: Progress = lambda *_: None,
    grammars: Grammars | None = None,
    limits: MediaMemory | None = None,
) -> Engine:
    """Return an engine that runs *model* with *peers* in *caches*, whatever these hold. Raises StartupError."""
    network, spec = model.network, model.network.spec
    max_model_len = memory.model_length(config, spec.max_position_embeddings, caches.sizes.num_blocks)
    budgets = Budgets(
        *memory.limits(config, model),
        config.max_num_waiting,
        whole_images=spec.longest_whole > 0,
        step_seconds=config.max_inter_token_latency,
    )
    graphs = execution.encoder_graphs
    most_whole = 0 if graphs is None else graphs.by_size.sizes[-1]
    costs = EncodeCosts.of_model(spec, network.dtype.itemsize, budgets.encode_budget_patches, most_whole)
    blocks, encoder_cache = _block_manager(config, spec, caches), EncoderCache(config.encoder_cache_bytes)
    speculation = Speculation.of_config(config.speculation) if config.speculation else None
    scheduler = Scheduler(budgets, blocks, encoder_cache, costs, speculation)
    if peers is not None:
        peers.renew(config.cuda_graphs is not False)
    executor = LocalExecutor(make_runner(config, model, execution, caches, progress), peers)
    description = describe(config, model, execution, max_model_len, caches.sizes)
    recorder = None
    if config.record_steps is not None:
        recorder = Recorder(executor, _header(config, describe_machine(description, execution.threads.count), caches))
    description = msgspec.structs.replace(
        description, takes_grammars=grammars is not None, takes_thinking_budgets=config.role == "both"
    )
    max_positions = spec.max_position_embeddings if max_model_len > spec.max_position_embeddings else None
    validator = RequestValidator(spec, model.fingerprint, max_model_len, limits, config.seed, max_positions)
    is_ahead = network.device.type == "cuda" if config.async_scheduling is None else config.async_scheduling
    new_engine = partial(Engine, recorder or executor, scheduler, validator, steps_ahead=int(is_ahead))
    if config.role == "both":
        return new_engine(description, recorder, grammars)
    form = kv_form(description, caches)
    transfers = KvTransfers(TransferConfig(form, config.kv_transfer_bind, config.kv_transfer_seconds))
    described = msgspec.structs.replace(description, kv_transfer_address=transfers.address)
    connector = KvSender if config.role == "prefill" else KvReceiver
    return new_engine(described, new_connector=partial(connector, transfers, form))


def _grammars(config: EngineConfig, model: LoadedModel) -> Grammars | None:
    """Return the grammar compiler for *model*, which reads the vocabulary in the background.

    Return None for a model without a tokenizer, and for a prefill or decode worker.
    """
    if config.role != "both" or not has_vocabulary(model.files):
        return None
    spec = model.network.spec
    read = partial(read_vocabulary, model.files, spec.vocab_size)
    return Grammars(read, spec.vocab_size, spec.placeholder_token_ids)


def _block_manager(config: EngineConfig, spec: ModelSpec, caches: Caches) -> BlockManager:
    sizes, in_window = caches.sizes, None
    blocks = PagedBlocks(sizes.num_blocks, sizes.block_size, keep_contents=config.kv_events_token_ids)
    checkpoints = None
    if caches.has_recurrent_layers:
        checkpoints = StateCheckpoints(sizes.num_checkpoints, sizes.block_size, config.state_snapshot_blocks)
    if (window := window_of(spec.kv_specs)) is not None:
        in_window = WindowBlocks(sizes.num_window_blocks, sizes.block_size, window, spec.longest_whole)
    return BlockManager(blocks, checkpoints, config.enable_prefix_caching, in_window)


def _header(config: EngineConfig, machine: Machine, caches: Caches) -> Header:
    """Return the information from which a replay creates an identical executor."""
    resolved = dataclasses.replace(
        config,
        device=caches.device.type,  # type: ignore[arg-type]
        dtype=machine.dtype,  # type: ignore[arg-type]
        threads=machine.num_threads,
        num_blocks=caches.sizes.num_blocks,
        num_state_snapshots=caches.sizes.num_checkpoints,
    )
    return Header(machine=machine, config=resolved)

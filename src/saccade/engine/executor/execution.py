"""Choose the attention backends, operations, graphs and threads for a network."""

import dataclasses
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import structlog

from saccade import models
from saccade.engine.config import EngineConfig
from saccade.engine.executor import decode_graphs, encoder_graphs, memory
from saccade.engine.executor.encoder_graphs import EncoderGraphs
from saccade.engine.executor.kernels import compile_kernels, reported
from saccade.engine.executor.loader import LoadedModel
from saccade.engine.executor.malloc import keep_freed_memory
from saccade.engine.executor.threads import Threads, choose_threads
from saccade.engine.executor.unpacking import unpack_once
from saccade.engine.executor.weight_filler import Progress
from saccade.errors import StartupError
from saccade.models.backbones.gated_delta_net import GatedDeltaNet
from saccade.models.files import image_processor, parse_json
from saccade.models.spec import Latent, Paged, has_states
from saccade.nn.backends import AUTO, Workload, load_backend, load_vision_backend, trial, why
from saccade.nn.backends.compilers import find_toolkit, use_toolkit
from saccade.nn.backends.trial import tried
from saccade.nn.backends.workload import cost_of_cache
from saccade.nn.context import AttentionBackend, VisionAttentionBackend
from saccade.nn.layers import use_operations
from saccade.nn.libraries import Unavailable, attempt
from saccade.nn.ops import OF_STATES, Operations, resolve
from saccade.nn.parallel import ALONE, Ranks
from saccade.nn.vision import PackedSelfAttention
from saccade.protocol.media import ImageLayout
from saccade.protocol.model_files import CONFIG

LARGE_SIDE = 1 << 13
"""The sides, in pixels, of an image that every family's settings reduce."""

MAX_ASPECT = 12

logger = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Execution:
    """The backends, graphs and threads of one loaded model; *reasons* explain the backends, the decoder's first.

    Videos of more than *encode_budget* patches are encoded in parts.
    """

    backend: AttentionBackend
    vision_backend: VisionAttentionBackend
    threads: Threads
    ranks: Ranks = ALONE
    reasons: tuple[str, str] = ("", "")
    encoder_graphs: EncoderGraphs | None = None
    encode_budget: int | None = None
    captures_decodes: bool = False
    of_weights: str = ""
    """How weights that no kernel takes are multiplied, for people; "" if there are none."""

    def capture_encoder(self) -> Iterable[tuple[int, int]]:
        """Capture the vision encoder's graphs; yield how many are done, and how many there are. Raises StartupError.

        Call it before the KV pool is sized, so that the graphs' memory counts.
        """
        return () if self.encoder_graphs is None else self.encoder_graphs.by_size.capture_graphs()


def prepare_execution(config: EngineConfig, model: LoadedModel, progress: Progress = lambda *_: None) -> Execution:
    """Choose how to compute a loaded model, pack its weights, and compile its kernels.

    Raises StartupError if a backend cannot compute the model, if --cuda-graphs asks for graphs that are not possible,
    or if a kernel fails.
    """
    network = model.network
    of_decoder, of_tower = decoder_workload(config, model), tower_workload(model)
    if network.device.type == "cuda":
        use_toolkit(find_toolkit(), os.environ)
        with reported(progress, "trying attention backends, whose kernels later starts find"):
            backend, of_decoder = tried(load_backend, config.attention_backend, of_decoder, trial.of_decoder)
            vision_backend, of_tower = tried(
                load_vision_backend, config.mm_encoder_attn_backend, of_tower, trial.of_tower
            )
    else:
        backend = load_backend(config.attention_backend, of_decoder)
        vision_backend = load_vision_backend(config.mm_encoder_attn_backend, of_tower)
    costs = cost_of_cache(of_decoder)
    if costs is not None:
        logger.warning("the KV cache is slow", reason=costs)
    operations = choose_operations(config, model, of_decoder, progress)
    with reported(progress, "packing weights"):
        reasons = use_operations(model.module, operations)
        network.share_head()
    of_weights = ""
    if reasons and network.device.type == "cpu":
        with reported(progress, "dequantising weights that no kernel takes"):
            of_weights = unpack_once(config, model, reasons)
    elif reasons:
        logger.warning("quantised weights are dequantised at each use, which is slow", reasons=reasons)
    if network.device.type == "cuda":
        compile_kernels(model.module, most_tokens(config, model), model.ranks, progress)
    else:
        keep_freed_memory()
    captures = memory.may_capture(config, model)
    refused = decode_graphs.refusal(model.module, backend, network.device, network.dtype) if captures else None
    if refused is not None:
        if config.cuda_graphs:
            raise StartupError(f"--cuda-graphs {refused}")
        logger.warning("decode steps run without CUDA graphs", reason=f"--cuda-graphs {refused}")
    graphs, of_graphs = choose_encoder_graphs(config, model, vision_backend)
    budget = memory.limits(config, model).encode_budget_patches
    choices = (
        why(config.attention_backend, backend, of_decoder)
        + (f"; {costs}" if costs else "")
        + (f"; no CUDA graphs: --cuda-graphs {refused}" if refused else ""),
        why(config.mm_encoder_attn_backend, vision_backend, of_tower) + of_graphs,
    )
    threads = choose_threads(config.threads, model.num_parameters, model.ranks.size)
    return Execution(
        *(backend, vision_backend, threads, model.ranks, choices, graphs, budget),
        captures_decodes=captures and refused is None,
        of_weights=of_weights,
    )


def choose_operations(
    config: EngineConfig, model: LoadedModel, workload: Workload, progress: Progress = lambda *_: None
) -> Operations:
    """Return the operations for *model*.

    The delta rule is the plain one in a prefill/decode split, or if the faster kernel fails its trial.
    """
    place = workload.device.type, workload.dtype
    plain = resolve(*place)
    # The kernel has states in another layout, and the other worker of a split may lack it.
    if not has_states(model.network.spec.kv_specs) or config.role != "both":
        return plain
    operations = resolve(*place, OF_STATES)
    if operations.gated_delta_rule is plain.gated_delta_rule:
        return plain
    try:
        with attempt():
            num_proposed = config.speculation.num_tokens if config.speculation else 0
            num_rows, note = memory.limits(config, model).max_num_seqs, partial(progress, "trying the delta rule")
            for heads in {layer.rule_heads for layer in model.module.modules() if isinstance(layer, GatedDeltaNet)}:
                trial.of_delta_rule(operations, workload, heads, num_proposed, num_rows, note)
    except Unavailable as error:
        logger.warning("an operation is slower than it could be", operation="gated_delta_rule", reason=error.reason)
        return plain
    return dataclasses.replace(plain, gated_delta_rule=operations.gated_delta_rule)


def choose_encoder_graphs(
    config: EngineConfig, model: LoadedModel, backend: VisionAttentionBackend
) -> tuple[EncoderGraphs | None, str]:
    """Return the vision encoder's graphs, if they are requested and possible, and their line in the summary."""
    if not (config.mm_encoder_cuda_graph and model.network.spec.takes_media):
        return None, ""
    reason = encoder_graphs.refusal(model.network, backend, model.ranks.size > 1 and model.ranks.cuts_encoder)
    if reason is not None:
        logger.warning("the vision encoder runs without CUDA graphs", reason=reason)
        return None, f"; no CUDA graphs: {reason}"
    graphs = EncoderGraphs(model.network, backend, memory.limits(config, model).encode_budget_patches)
    return graphs, f"; CUDA graphs for up to {graphs.by_size.sizes[-1]} patches"


def most_patches(config: EngineConfig, model: LoadedModel) -> int:
    """Return the number of patches in the largest image that the settings allow, or in a step if that is more."""
    # Sides are rounded up to whole squares of patches in some families, of narrow images by an eighth.
    rounded = model.network.spec.encode_cost(largest_image(model).grid) * 9 // 8
    return max(memory.limits(config, model).encode_budget_patches, rounded)


def most_tokens(config: EngineConfig, model: LoadedModel) -> int:
    """Return the most rows that a matrix product in a step has: tokens, or patches of its images."""
    num_tokens = memory.limits(config, model).max_num_batched_tokens + model.network.spec.longest_whole
    return max(num_tokens, most_patches(config, model)) if model.network.spec.takes_media else num_tokens


def largest_image(model: LoadedModel) -> ImageLayout:
    """Return the layout of the largest image that the model's settings allow."""
    parsed = parse_json(model.files, CONFIG)
    family = models.family_of(parsed)
    layout = models.load_layout(family)(parsed, image_processor(model.files, models.families()[family]))
    # Of some families, an image has more tiles if it is no square.
    sides = [LARGE_SIDE // part for part in range(1, MAX_ASPECT + 1)]
    images = (layout.image(width, height, layout.settings) for width in sides for height in sides)
    return max(images, key=lambda image: model.network.spec.encode_cost(image.grid))


def check_encoder_cache(config: EngineConfig, model: LoadedModel) -> None:
    """Warn if the largest image does not fit into the encoder cache."""
    if not model.network.spec.takes_media:
        return
    largest, spec = largest_image(model), model.network.spec
    num_bytes = spec.encoder_output_values(largest.grid, largest.original_size) * model.network.dtype.itemsize
    if 0 < config.encoder_cache_bytes < num_bytes:
        logger.warning(
            "the largest images have no room in the encoder cache, and are encoded for each request",
            largest_bytes=num_bytes,
            reason=f"--encoder-cache-bytes {config.encoder_cache_bytes}",
        )


def decoder_workload(config: EngineConfig, model: LoadedModel) -> Workload:
    """Return the workload that an attention backend gets from the decoder of *model*."""
    network = model.network
    kv_specs = network.spec.kv_specs
    sizes = frozenset((kv_spec.key_width, kv_spec.value_width) for kv_spec in kv_specs if isinstance(kv_spec, Paged))
    has_latent_layers = any(isinstance(kv_spec, Latent) for kv_spec in kv_specs)
    cache_dtype = memory.block_format(config, model).dtype
    is_captured = bool(config.cuda_graphs) and config.attention_backend == AUTO
    looks_ahead = network.spec.longest_whole > 0
    return Workload(network.device, network.dtype, cache_dtype, sizes, has_latent_layers, is_captured, looks_ahead)


def tower_workload(model: LoadedModel) -> Workload:
    """Return the workload that an attention backend gets from the vision tower of *model*."""
    layers = (layer for layer in model.module.modules() if isinstance(layer, PackedSelfAttention))
    sizes = frozenset((layer.head_dim, layer.head_dim) for layer in layers)
    return Workload(model.network.device, model.network.dtype, head_sizes=sizes)

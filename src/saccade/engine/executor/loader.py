"""Load the model that a config names: its network, with this rank's part of a checkpoint's weights."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import nn

from saccade import models
from saccade.engine.config import EngineConfig
from saccade.engine.executor.fingerprint import model_fingerprint, weights_digest
from saccade.engine.executor.quantisation import Quantisation
from saccade.engine.executor.rounding import FP8, bytes_saved, rounding
from saccade.engine.executor.tied_head import settle_head
from saccade.engine.executor.weight_files import open_checkpoint
from saccade.engine.executor.weight_filler import Progress, fill, fill_randomly
from saccade.engine.executor.weight_formats import read_quantisation
from saccade.engine.executor.weight_plan import LoadPlan, make_plan
from saccade.errors import StartupError
from saccade.models.files import engine_config, image_processor, parse_json, read_model_files, with_overrides
from saccade.models.network import LoadsItself, Network
from saccade.nn.cpu import multiplies_bfloat16
from saccade.nn.parallel import ALONE, Ranks
from saccade.protocol.description import ModelFiles
from saccade.protocol.model_files import CONFIG

logger = structlog.get_logger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A loaded network on its device."""

    network: Network
    module: nn.Module
    """The network as torch knows it."""
    files: ModelFiles
    fingerprint: bytes
    """32 bytes that name files and weights."""
    num_parameters: int
    """Values of this rank: one of several *ranks* holds its part of the weights."""
    ranks: Ranks = ALONE
    kv_scales: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    """The checkpoint's scales of cached keys and values, by layer."""
    weights_digest: bytes = b""
    """32 bytes that name the weights without the files."""
    weight_formats: str = ""
    """The formats of quantised weights, for people; "" if all are plain."""
    rounding_saves: int = 0
    """Bytes that --quantization int8 would save."""


def load_model(config: EngineConfig, progress: Progress, ranks: Ranks = ALONE) -> LoadedModel:
    """Return the network that *config* names, with this rank's part of the weights. Raises StartupError."""
    # PyTorch would prefer cuDNN on Hopper and newer, which builds a plan for every new shape: tens of milliseconds for
    # each new length of a prompt, and plans that are never released.
    torch.backends.cuda.enable_cudnn_sdp(False)
    folder = Path(config.model_dir)
    files = with_overrides(
        *(read_model_files(folder), config.hf_overrides, config.override_generation_config, config.generation_config),
        config.model_impl,
    )
    # The network is first built without storage, so that no float32 copy and no random initial values are created.
    drafts = config.speculation is not None and config.speculation.method == "mtp"
    parsed, network = empty_network(files, config.max_model_len, ranks, drafts=drafts)
    device = choose_device(config.device, ranks)
    if config.quantization not in (None, FP8) and device.type != "cpu":
        raise StartupError(
            f"--quantization {config.quantization} has kernels for CPUs alone. Give --quantization fp8 to round plain "
            f"weights on a GPU, or --device cpu to compute on the CPU."
        )
    dtype = choose_dtype(config.dtype, device, parsed)
    quantisation = read_quantisation(parsed, folder)
    if config.quantization is not None and quantisation is not None:
        _check_plain(config.quantization, quantisation)
    if not network.spec.takes_more_tokens:
        _check_length(config, network.spec.max_position_embeddings)
    network.to(dtype)
    choice = config.quantization if quantisation is None else None
    kv_scales: Mapping[int, tuple[float, float]] = {}
    if config.load_format == "dummy":
        if quantisation is not None:
            raise StartupError(
                f"--load-format dummy makes plain weights, but {quantisation.source} says that they are quantised."
            )
        num_parameters = count_parameters(network)
        fill_randomly(network, device, progress, rounding(network, choice))
    elif isinstance(network, LoadsItself):
        if quantisation is not None or config.quantization is not None:
            raise StartupError("Quantised weights are not served with --model-impl; leave out --quantization.")
        num_parameters = network.load_weights(folder, device)
    else:
        with open_checkpoint(folder) as checkpoint:
            settle_head(network, checkpoint)
            num_parameters = count_parameters(network)
            plan = make_plan(network, checkpoint, quantisation, ranks)
            _note_spare(plan, config)
            fill(network, plan, checkpoint, device, progress, rounding(network, choice))
            kv_scales = plan.cache_scales.read_scales(checkpoint)
    weight_formats, rounding_saves = "", 0
    if quantisation is not None:
        weight_formats = quantisation.formats
    elif choice is not None:
        weight_formats = f"rounded by --quantization {choice}"
    elif device.type == "cpu":
        rounding_saves = bytes_saved(network)
    network.finish()
    return LoadedModel(
        network.eval(),
        network,
        files,
        model_fingerprint(config, files),
        num_parameters,
        ranks,
        kv_scales,
        weights_digest(config, files),
        weight_formats,
        rounding_saves,
    )


def _check_plain(choice: str, quantisation: Quantisation) -> None:
    """Raise StartupError unless *choice*, a value of --quantization, leaves weights with *quantisation* as they are."""
    if choice != FP8 or not quantisation.is_fp8:
        raise StartupError(
            f"--quantization {choice} rounds plain weights, but {quantisation.source} says that they are in the format "
            f"{quantisation.formats}. Leave the flag out: they are used as they are."
        )


def empty_network(
    files: ModelFiles, max_model_len: int | None = None, ranks: Ranks = ALONE, *, drafts: bool = False
) -> tuple[Mapping[str, Any], Any]:
    """Return the parsed config.json of *files* and the network without storage. Raises StartupError."""
    family = models.family_of(parse_json(files, CONFIG))
    declaration = models.families()[family]
    parsed = engine_config(files, declaration, max_model_len, drafts=drafts)
    spec = models.load_spec(family, parsed)
    if drafts and not spec.drafts:
        raise StartupError(
            f"--speculative-config: the method mtp needs a draft layer of the model's own, and Saccade knows none of "
            f"{family}. The method ngram works with every model."
        )
    with torch.device("meta"):
        return parsed, models.load_network(family)(spec, parsed, image_processor(files, declaration), ranks)


def count_parameters(network: nn.Module) -> int:
    """Return the number of values in the parameters of *network*."""
    return sum(parameter.numel() for parameter in network.parameters())


def _note_spare(plan: LoadPlan, config: EngineConfig) -> None:
    """Log which of the checkpoint's scales are not used: those of activations, and of a cache that is not float8."""
    scales = plan.cache_scales
    is_float8 = config.kv_cache_dtype == "fp8"
    of_cache = {tensor.name: tensor for tensors in scales.tensors.values() for tensor in tensors}
    spare = plan.spare + scales.spare + Counter(() if is_float8 else (name.rpartition(".")[2] for name in of_cache))
    if spare:
        logger.info("scales that the arithmetic does not need are not used", tensors=dict(spare))


def _check_length(config: EngineConfig, max_position_embeddings: int) -> None:
    """Raise StartupError if the config requests more positions than the model has."""
    if config.max_model_len is not None and config.max_model_len > max_position_embeddings:
        raise StartupError(
            f"--max-model-len is {config.max_model_len}, but the model has {max_position_embeddings} positions "
            f"(max_position_embeddings in {CONFIG}). Lower --max-model-len, or leave it out to get all of them."
        )


def choose_device(name: str, ranks: Ranks = ALONE) -> torch.device:
    """Return this rank's device for *name* (auto, cpu, cuda): the CPU, or the rank's GPU. Raises StartupError."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise StartupError("device is cuda, but torch finds no CUDA device.")
    if name == "cpu" or not available:
        return torch.device("cpu")
    if ranks.size == 1:
        return torch.device("cuda")
    if ranks.size > torch.cuda.device_count():
        raise StartupError(
            f"--tensor-parallel-size is {ranks.size}, but torch finds {torch.cuda.device_count()} CUDA devices."
        )
    # A process has a context on each device that it touches: this makes it touch no other.
    torch.cuda.set_device(ranks.rank)
    return torch.device("cuda", ranks.rank)


def choose_dtype(name: str, device: torch.device, config: Mapping[str, Any]) -> torch.dtype:
    """Return the network's dtype. Raises StartupError.

    The *name* auto stands for the checkpoint's own dtype. On a CPU it stands for float32, unless the checkpoint uses
    bfloat16 and the processor supports it.
    """
    if name != "auto":
        return DTYPES[name]
    text = config.get("text_config") or {}
    spellings = (config.get("dtype"), config.get("torch_dtype"), text.get("dtype"), text.get("torch_dtype"))
    stated = next((spelling for spelling in spellings if spelling), "bfloat16")
    if stated not in DTYPES:
        raise StartupError(f"{CONFIG}: dtype {stated!r} is not served; known: {', '.join(DTYPES)}.")
    if device.type == "cpu" and not (stated == "bfloat16" and multiplies_bfloat16()):
        return torch.float32
    return DTYPES[stated]

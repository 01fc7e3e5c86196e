"""Load checkpoint files into parameters: safetensors, memory-mapped, one file or a sharded index."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch import nn

from saccade import models
from saccade.engine.config import EngineConfig
from saccade.errors import StartupError
from saccade.identity.content import files_digest
from saccade.models.files import image_processor, parse_json, read_model_files
from saccade.models.network import Network
from saccade.nn.cpu import multiplies_bfloat16
from saccade.protocol.description import ModelFiles
from saccade.protocol.model_files import CONFIG

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MIB = 1 << 20
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Progress = Callable[[str, int, int], None]
"""Called with the name of a stage, and its done and total units."""


@dataclass(frozen=True)
class LoadedModel:
    """A loaded network on its device, also as a torch *module*, with its names and fingerprint."""

    network: Network
    module: nn.Module
    files: ModelFiles
    fingerprint: bytes
    num_parameters: int


def load_model(config: EngineConfig, progress: Progress) -> LoadedModel:
    """Return the network that *config* names, loaded. Raises StartupError."""
    folder = Path(config.model_dir)
    files = read_model_files(folder)
    parsed = parse_json(files, CONFIG)
    family = models.family_of(parsed)
    facts = models.load_facts(family, parsed)
    build = models.load_network(family)
    processor = image_processor(files, models.families()[family])
    device = choose_device(config.device)
    _check_length(config, facts.max_position_embeddings)
    # The network is first built without storage, so that no float32 copy and no random initial values are created.
    with torch.device("meta"):
        network = build(facts, parsed, processor)
    network.to(choose_dtype(config.dtype, device, parsed))
    network.to_empty(device=device)
    weights = weight_files(folder)
    load_weights(network, weights, progress)
    num_parameters = sum(parameter.numel() for parameter in network.parameters())
    network.finish()
    return LoadedModel(network.eval(), network, files, fingerprint(files, weights), num_parameters)


def _check_length(config: EngineConfig, max_position_embeddings: int) -> None:
    """Raise StartupError if the config requests more positions than the model has."""
    if config.max_model_len is not None and config.max_model_len > max_position_embeddings:
        raise StartupError(
            f"--max-model-len is {config.max_model_len}, but the model has {max_position_embeddings} positions "
            f"(max_position_embeddings in {CONFIG}). Lower --max-model-len, or leave it out to get all of them."
        )


def weight_files(folder: Path) -> list[Path]:
    """Return the checkpoint's safetensors files, in name order. Raises StartupError if one is missing."""
    index = folder / INDEX
    if not index.is_file():
        if not (folder / WEIGHTS).is_file():
            raise StartupError(f"{folder} holds neither {WEIGHTS} nor {INDEX}.")
        return [folder / WEIGHTS]
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise StartupError(f"{index} has no readable `weight_map`.") from error
    files = [folder / Path(name).name for name in names]
    for file in files:
        if not file.is_file():
            raise StartupError(f"{INDEX} names {file.name}, which is not in {folder}.")
    return files


def fingerprint(files: ModelFiles, weights: list[Path]) -> bytes:
    """Return 32 bytes that identify model and weights.

    Of each weights file only the size, header, first and last MiB are read, since a checkpoint may have terabytes.
    """
    hasher = blake3(b"saccade.model.1" + files_digest(files.files))
    for path in weights:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            header = file.read(min(int.from_bytes(prefix, "little"), size))
            first = file.read(MIB)
            file.seek(max(0, size - MIB))
            parts = (path.name.encode(), size.to_bytes(8, "little"), prefix, header, first, file.read(MIB))
        for part in parts:
            hasher.update(len(part).to_bytes(8, "little"))
            hasher.update(part)
    return hasher.digest()


def choose_device(name: str) -> torch.device:
    """Return the device for *name* (auto, cpu, cuda). Raises StartupError."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise StartupError("device is cuda, but torch finds no CUDA device.")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and available) else "cpu")


def choose_dtype(name: str, device: torch.device, config: Mapping[str, Any]) -> torch.dtype:
    """Return the network's dtype. Raises StartupError.

    auto is the checkpoint's own; on a CPU it is float32 unless the checkpoint uses bfloat16 and the processor supports
    it.
    """
    if name != "auto":
        return DTYPES[name]
    text = config.get("text_config", {})
    spellings = (config.get("dtype"), config.get("torch_dtype"), text.get("dtype"), text.get("torch_dtype"))
    stated = next((spelling for spelling in spellings if spelling), "bfloat16")
    if stated not in DTYPES:
        raise StartupError(f"{CONFIG}: dtype {stated!r} is not served; known: {', '.join(DTYPES)}.")
    if device.type == "cpu" and not (stated == "bfloat16" and multiplies_bfloat16()):
        return torch.float32
    return DTYPES[stated]


def load_weights(network: nn.Module, weights: list[Path], progress: Progress) -> None:
    """Fill *network*'s parameters. Raises StartupError for missing, unexpected and mis-shaped tensors."""
    parameters = dict(network.named_parameters())
    places = {name: network.get_submodule(name.rpartition(".")[0]) for name in parameters}
    missing = {(name, part) for name in parameters for part in _partitions(places[name])}
    for done, path in enumerate(weights):
        progress("loading weights", done, len(weights))
        for name, tensor in _tensors(path):
            target = network.locate(name)  # type: ignore[operator]
            if target is None:
                continue
            if target.parameter not in parameters:
                raise StartupError(f"{path.name}: the network has no parameter for the tensor {name}.")
            destination = _destination(parameters[target.parameter], places[target.parameter], target.partition)
            if destination.shape != tensor.shape:
                shapes = f"{list(tensor.shape)}, but the network needs {list(destination.shape)}"
                raise StartupError(f"{path.name}: the tensor {name} has shape {shapes}.")
            destination.copy_(tensor)
            missing.discard((target.parameter, target.partition))
    if missing:
        name, part = min(missing, key=str)
        where = name if part is None else f"{name} (part {part})"
        raise StartupError(f"The checkpoint lacks {len(missing)} tensors, the first for the parameter {where}.")
    progress("loading weights", len(weights), len(weights))


def _partitions(module: nn.Module) -> list[int | None]:
    count = len(getattr(module, "partitions", ()))
    return list(range(count)) if count > 1 else [None]


def _destination(parameter: nn.Parameter, module: nn.Module, partition: int | None) -> torch.Tensor:
    if partition is None:
        return parameter.data
    sizes: tuple[int, ...] = module.partitions  # type: ignore[assignment]
    return parameter.data.narrow(0, sum(sizes[:partition]), sizes[partition])


def _tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)
    except SafetensorError as error:
        raise StartupError(f"{path} is not a readable safetensors file; it may be damaged or truncated.") from error

"""Load checkpoint files into parameters: safetensors, memory-mapped, one file or a sharded index."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch import nn

from saccade import models
from saccade.engine.config import EngineConfig
from saccade.errors import StartupError
from saccade.identity.content import files_digest
from saccade.models.files import engine_config, image_processor, parse_json, read_model_files
from saccade.models.network import Network, Target
from saccade.nn.cpu import multiplies_bfloat16
from saccade.nn.parallel import ALONE, Ranks, Sharding
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
    """A loaded network on its device, also as a torch *module*, with its names and fingerprint.

    With more than one of *ranks*, the network holds this rank's part of the weights.
    """

    network: Network
    module: nn.Module
    files: ModelFiles
    fingerprint: bytes
    num_parameters: int
    ranks: Ranks = ALONE


def load_model(config: EngineConfig, progress: Progress, ranks: Ranks = ALONE) -> LoadedModel:
    """Return the network that *config* names, with this rank's part of the weights. Raises StartupError."""
    folder = Path(config.model_dir)
    files = read_model_files(folder)
    family = models.family_of(parse_json(files, CONFIG))
    declaration = models.families()[family]
    parsed = engine_config(files, declaration, config.max_model_len)
    facts = models.load_facts(family, parsed)
    build = models.load_network(family)
    processor = image_processor(files, declaration)
    device = choose_device(config.device, ranks)
    _check_length(config, facts.max_position_embeddings)
    # The network is first built without storage, so that no float32 copy and no random initial values are created.
    with torch.device("meta"):
        network = build(facts, parsed, processor, ranks)
    network.to(choose_dtype(config.dtype, device, parsed))
    network.to_empty(device=device)
    weights = weight_files(folder)
    load_weights(network, weights, progress, ranks)
    num_parameters = sum(parameter.numel() for parameter in network.parameters())
    network.finish()
    return LoadedModel(network.eval(), network, files, fingerprint(files, weights), num_parameters, ranks)


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


def choose_device(name: str, ranks: Ranks = ALONE) -> torch.device:
    """Return this rank's device for *name* (auto, cpu, cuda): the GPU with the rank's number. Raises StartupError."""
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


def load_weights(network: nn.Module, weights: list[Path], progress: Progress, ranks: Ranks = ALONE) -> None:
    """Fill *network*'s parameters. Raises StartupError for missing, unexpected and mis-shaped tensors."""
    places = {name: _Place.of(network, name, ranks) for name, _ in network.named_parameters()}
    missing = {(name, part, expert) for name, place in places.items() for part, expert in place.owed()}
    for done, path in enumerate(weights):
        progress("loading weights", done, len(weights))
        for name, tensor in _tensors(path):
            target = network.locate(name)  # type: ignore[operator]
            if target is None:
                continue
            if target.parameter not in places:
                raise StartupError(f"{path.name}: the network has no parameter for the tensor {name}.")
            try:
                missing -= {(target.parameter, *filled) for filled in places[target.parameter].fill(target, tensor)}
            except _WrongShape as wrong:
                shapes = f"{list(tensor.shape)}, but the network needs {list(wrong.needed)}"
                raise StartupError(f"{path.name}: the tensor {name} has shape {shapes}.") from wrong
    if missing:
        name, part, expert = min(missing, key=str)
        details = ", ".join(
            f"{what} {which}" for what, which in (("part", part), ("expert", expert)) if which is not None
        )
        where = f"{name} ({details})" if details else name
        raise StartupError(f"The checkpoint lacks {len(missing)} tensors, the first for the parameter {where}.")
    progress("loading weights", len(weights), len(weights))


class _WrongShape(Exception):
    """A checkpoint tensor has another shape than *needed*."""

    def __init__(self, needed: tuple[int, ...]) -> None:
        super().__init__(needed)
        self.needed = needed


Filled = tuple[int | None, int | None]
"""A partition and an expert, None where a parameter has only one."""


class _Place(NamedTuple):
    """A parameter of this rank. With *experts*, its first dimension has one entry for each of the rank's experts."""

    parameter: torch.Tensor
    sharding: Sharding
    ranks: Ranks
    experts: Sharding | None

    @classmethod
    def of(cls, network: nn.Module, name: str, ranks: Ranks) -> "_Place":
        owner, _, own_name = name.rpartition(".")
        module, parameter = network.get_submodule(owner), network.get_parameter(name).data
        shardings: Mapping[str, Sharding] = getattr(module, "shardings", {})
        experts: Mapping[str, Sharding] = getattr(module, "experts", {})
        inner = parameter[0] if own_name in experts else parameter
        whole = Sharding((inner.shape[0],)) if inner.ndim else Sharding((1,))
        return cls(parameter, shardings.get(own_name, whole), ranks, experts.get(own_name))

    def owed(self) -> list[Filled]:
        """Return what the checkpoint must fill."""
        parts = list(range(len(self.sharding.parts))) if len(self.sharding.parts) > 1 else [None]
        return [(part, expert) for part in parts for expert in self._own_experts()]

    def _own_experts(self) -> list[int | None]:
        if self.experts is None:
            return [None]
        (piece,) = self.experts.pieces(self.ranks)
        return list(range(piece.source, piece.source + piece.length))

    def fill(self, target: Target, tensor: torch.Tensor) -> list[Filled]:
        """Copy this rank's piece of *tensor*, and return what it filled. Raises _WrongShape."""
        if target.transposed:
            tensor = tensor.transpose(-1, -2)
        own = self._own_experts()
        if self.experts is None:
            return [(part, None) for part in self._fill_parts(self.parameter, target.partition, tensor)]
        if target.expert is not None:
            if target.expert not in own:
                return []
            parts = self._fill_parts(self.parameter[own.index(target.expert)], target.partition, tensor)
            return [(part, target.expert) for part in parts]
        if len(tensor) != sum(self.experts.parts):
            raise _WrongShape((*self.experts.parts, *self.parameter.shape[1:]))
        return [
            (part, expert)
            for index, expert in enumerate(own)
            for part in self._fill_parts(self.parameter[index], target.partition, tensor[expert or 0])
        ]

    def _fill_parts(self, parameter: torch.Tensor, only: int | None, tensor: torch.Tensor) -> list[int | None]:
        """Copy the pieces of one part of the full tensor, or of all parts."""
        if not parameter.ndim:
            if tensor.numel() != 1:
                raise _WrongShape(())
            parameter.copy_(tensor.view(()))
            return [None]
        parts, dim = self.sharding.parts, self.sharding.dim
        needed = list(parameter.shape)
        needed[dim] = sum(parts) if only is None else parts[only]
        if list(tensor.shape) != needed:
            raise _WrongShape(tuple(needed))
        for piece in self.sharding.pieces(self.ranks):
            if only in (None, piece.part):
                begin = sum(parts[: piece.part]) if only is None else 0
                source = tensor.narrow(dim, begin + piece.source, piece.length)
                parameter.narrow(dim, piece.start, piece.length).copy_(source)
        if len(parts) == 1:
            return [None]
        return list(range(len(parts))) if only is None else [only]


def _tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)
    except SafetensorError as error:
        raise StartupError(f"{path} is not a readable safetensors file; it may be damaged or truncated.") from error

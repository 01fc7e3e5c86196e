"""Decide what a rounded copy has of each tensor of a checkpoint."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

from saccade.engine.executor.rounding import GROUP_SIZE, HEAD, INT4, INT8, formats_of_layers
from saccade.engine.executor.weight_fields import WEIGHT
from saccade.engine.executor.weight_files import Checkpoint, StoredTensor
from saccade.engine.executor.weight_places import PLAIN
from saccade.engine.executor.weight_plan import make_plan
from saccade.errors import StartupError
from saccade.models.network import Target
from saccade.nn.parallel import ALONE

BITS: Mapping[str, float] = MappingProxyType({INT8: 8, INT4: 4 + 16 / GROUP_SIZE})
"""The bits that a value takes in each format. Those of int8's scales, one for each row, are left out."""


class CopiedWeight(NamedTuple):
    """A tensor of the checkpoint, and the *format* to which it is rounded as the weight of *module*, or None."""

    source: StoredTensor
    module: str
    format: str | None

    @property
    def num_bytes(self) -> int:
        """About the size in the copy, in bytes."""
        return self.source.num_bytes if self.format is None else int(prod(self.source.shape) * BITS[self.format] / 8)


@dataclass(frozen=True)
class CopyPlan:
    """The *weights* of a copy, in the order of the files. With *has_own_head*, a tied head is stored in addition."""

    weights: tuple[CopiedWeight, ...]
    has_own_head: bool

    @property
    def num_bytes_before(self) -> int:
        """The size of the checkpoint's tensors, in bytes. A tied head has no tensor of its own."""
        return sum({weight.source.name: weight.source.num_bytes for weight in self.weights}.values())

    @property
    def num_bytes_to_read(self) -> int:
        """The size of all tensors that are read for the copy, in bytes; the embedding twice, if it is also the head."""
        return sum(weight.source.num_bytes for weight in self.weights)

    @property
    def num_bytes(self) -> int:
        """About the size of the copy's weights, in bytes."""
        return sum(weight.num_bytes for weight in self.weights)

    @property
    def formats(self) -> Mapping[str, str]:
        """The format of each rounded module."""
        return {weight.module: weight.format for weight in self.weights if weight.format is not None}

    @property
    def counts(self) -> dict[str, int]:
        """The number of rounded weights of each format."""
        return dict(Counter(self.formats.values()))

    @property
    def plain_modules(self) -> list[str]:
        """The modules whose matrix stays plain."""
        return [
            weight.module
            for weight in self.weights
            if weight.format is None and weight.source.name.endswith(f".{WEIGHT}") and len(weight.source.shape) > 1
        ]


def plan_copy(network: Any, checkpoint: Checkpoint, choice: str) -> CopyPlan:
    """Return what a copy has of *checkpoint*, whose weights are rounded as by --quantization *choice*.

    *network* is the checkpoint's, without storage, in the dtype to which weights are rounded first. Raises
    StartupError if the checkpoint does not fit it.
    """
    formats = formats_of_layers(network, choice)
    fillings = make_plan(network, checkpoint, None, ALONE).fillings
    has_own_head = network.is_tied and HEAD in formats
    format_of = {
        filling.fields[PLAIN].name: format
        for layer, format in formats.items()
        if not (has_own_head and layer == HEAD)
        for filling in fillings[f"{layer}.{WEIGHT}"]
    }
    replaced = {f"{layer}.{WEIGHT}" for layer in formats}
    weights = [
        CopiedWeight(tensor, tensor.name.rpartition(".")[0], format_of.get(tensor.name))
        for tensor in checkpoint.tensors.values()
        # Of several equal tensors of a rounded weight, only one counts.
        if tensor.name in format_of or not _is_of(network, tensor, replaced)
    ]
    if has_own_head:
        weights.append(CopiedWeight(_embedding(network, checkpoint), HEAD, formats[HEAD]))
    return CopyPlan(tuple(weights), has_own_head)


def _is_of(network: Any, tensor: StoredTensor, parameters: set[str]) -> bool:
    """Return whether *tensor* fills one of *parameters*, or is a head."""
    target = network.locate(tensor.name)
    is_head = f"{HEAD}.{WEIGHT}" in parameters and network.is_head(tensor.name)
    return is_head or (isinstance(target, Target) and target.parameter in parameters)


def _embedding(network: Any, checkpoint: Checkpoint) -> StoredTensor:
    """Return the tensor of a tied network's embedding. Raises StartupError."""
    place = network.locate(f"{HEAD}.{WEIGHT}")
    for tensor in checkpoint.tensors.values():
        if network.locate(tensor.name) == place and not network.is_head(tensor.name):
            return tensor
    raise StartupError(
        "The checkpoint has a head that is also the embedding, but no embedding: its copy would have none. Load and "
        "save it with transformers, which stores the embedding."
    )

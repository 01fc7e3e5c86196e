"""Finds where a checkpoint's tensors go in a rank's parameters."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from torch import nn

from saccade.engine.executor.weight_files import StoredTensor
from saccade.models.network import Target
from saccade.nn.formats.quantised import Region, WeightField, WeightFormat
from saccade.nn.parallel import PartSlice, Ranks, Sharding

PLAIN = ""
"""The field of a weight that is not quantised."""

Slot = tuple[int | None, int | None]
"""A part and an expert of a parameter; None if it has only one."""


class WeightPlace(NamedTuple):
    """A parameter of this rank, [experts, *shape] if it has *experts*, else *shape*.

    With *holds_formats*, its layer can hold a quantised weight instead.
    """

    name: str
    shape: tuple[int, ...]
    sharding: Sharding
    ranks: Ranks
    experts: Sharding | None
    holds_formats: bool

    @classmethod
    def of(cls, network: nn.Module, name: str, ranks: Ranks) -> "WeightPlace":
        """Return the place of *network*'s parameter *name*."""
        owner, _, own_name = name.rpartition(".")
        module, shape = network.get_submodule(owner), tuple(network.get_parameter(name).shape)
        shardings: Mapping[str, Sharding] = getattr(module, "shardings", {})
        experts: Mapping[str, Sharding] = getattr(module, "experts", {})
        entry = shape[1:] if own_name in experts else shape
        whole = Sharding((entry[0] if entry else 1,))
        holds_formats = len(entry) == 2 and hasattr(module, "hold")
        return cls(name, entry, shardings.get(own_name, whole), ranks, experts.get(own_name), holds_formats)

    @property
    def own_experts(self) -> list[int | None]:
        """The experts of this rank, in their order; [None] for a parameter without experts."""
        if self.experts is None:
            return [None]
        (piece,) = self.experts.pieces(self.ranks)
        return list(range(piece.source, piece.source + piece.length))

    @property
    def slots(self) -> list[Slot]:
        """The slots that the checkpoint must fill."""
        return self._slots(range(len(self.sharding.parts)), self.own_experts)

    def takes(self, target: Target) -> bool:
        """Return whether the parameter has the part and the expert of *target*, on any rank."""
        num_experts = 0 if self.experts is None else sum(self.experts.parts)
        return (target.partition or 0) < len(self.sharding.parts) and (
            target.expert is None or target.expert < num_experts
        )

    def filled(self, target: Target) -> list[Slot]:
        """Return the slots of this rank that a tensor with *target* fills."""
        parts = range(len(self.sharding.parts)) if target.partition is None else [target.partition]
        own = self.own_experts
        return self._slots(parts, own if target.expert is None else [one for one in own if one == target.expert])

    def _slots(self, parts: Iterable[int], experts: list[int | None]) -> list[Slot]:
        several = len(self.sharding.parts) > 1
        return [(part if several else None, expert) for part in parts for expert in experts]

    def checkpoint_shape(self, target: Target) -> tuple[int, ...]:
        """Return the shape that a checkpoint tensor with *target* must have."""
        entry = list(self.shape)
        if entry:
            parts = self.sharding.parts
            entry[self.sharding.dim] = sum(parts) if target.partition is None else parts[target.partition]
        if target.transposed:
            entry[-2:] = entry[-1], entry[-2]
        return (sum(self.experts.parts), *entry) if self.experts is not None and target.expert is None else (*entry,)

    def row_parts(self, target: Target) -> Sequence[int]:
        """Return the number of rows in each part of a weight with *target*."""
        if self.sharding.dim:
            return self.shape[:1]
        return self.sharding.parts if target.partition is None else (self.sharding.parts[target.partition],)

    def cuts(self, target: Target) -> Iterator[PartSlice]:
        """Yield this rank's cuts of a tensor with *target*, part by part. *source* counts from the tensor's start."""
        parts = self.sharding.parts
        for piece in self.sharding.pieces(self.ranks):
            if target.partition in (None, piece.part):
                begin = sum(parts[: piece.part]) if target.partition is None else 0
                yield piece._replace(source=begin + piece.source)

    def region(self, cut: PartSlice) -> Region:
        """Return the region of *cut* in a quantised weight [O, I]."""
        if self.sharding.dim == 0:
            return Region(cut.source, cut.length, 0, self.shape[1])
        return Region(0, self.shape[0], cut.source, cut.length)

    def slices(self, cut: PartSlice, target: Target, expert: int | None) -> tuple[slice, ...]:
        """Return the slices of a plain tensor with *target* that *cut* takes for *expert*."""
        slices = [slice(None)] * len(self.shape)
        if slices:
            slices[self.sharding.dim] = slice(cut.source, cut.source + cut.length)
        if target.transposed:
            slices[-2:] = slices[-1], slices[-2]
        return (*_of_expert(target, expert), *slices)


def field_slices(field: WeightField, region: Region, target: Target, expert: int | None) -> tuple[slice, ...]:
    """Return the slices of a tensor with *target*, a quantised weight's field, that *region* touches for *expert*."""
    slices = field.slices(region)
    return (*_of_expert(target, expert), *(slices[::-1] if is_turned(field, target) else slices))


def is_turned(field: WeightField, target: Target) -> bool:
    """Return whether the checkpoint stores the last two dimensions of *field* in the opposite order to memory."""
    return field.cell is not None and field.is_transposed != target.transposed


def _of_expert(target: Target, expert: int | None) -> tuple[slice, ...]:
    """Return the slice of *expert* in a tensor with all experts; nothing for a tensor of one expert."""
    return () if expert is None or target.expert is not None else (slice(expert, expert + 1),)


class Filling(NamedTuple):
    """Tensors that fill *target*: one that is plain, under the field PLAIN, or the fields of a weight in *format*.

    *derived* are the weight's tensors whose values follow from its shape. *weight* is the name that the weight itself
    would have.
    """

    target: Target
    fields: Mapping[str, StoredTensor]
    format: WeightFormat | None = None
    derived: Mapping[str, StoredTensor] = MappingProxyType({})
    weight: str = ""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """All tensors, by field."""
        return {**self.fields, **self.derived}

    @property
    def num_bytes(self) -> int:
        """The size of the fields in bytes."""
        return sum(tensor.num_bytes for tensor in self.fields.values())

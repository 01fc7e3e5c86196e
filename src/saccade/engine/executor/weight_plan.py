"""Read the headers of a checkpoint's files, and match the tensors to a network's parameters.

Every tensor must fill a parameter, have values that the network or the format computes itself, or be declared unneeded
by the family or format. Every parameter is filled once. All faults are reported together. Few tensors have their values
read: biases that only the checkpoint has, tensors that repeat others, and tensors whose values can be computed.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import nn

from saccade.engine.executor.cache_scales import CACHE_SCALE, CacheScales
from saccade.engine.executor.joined_experts import turned
from saccade.engine.executor.quantisation import Quantisation
from saccade.engine.executor.weight_fields import field_name, field_of, fitted
from saccade.engine.executor.weight_files import Checkpoint, StoredTensor, listed
from saccade.engine.executor.weight_places import PLAIN, Filling, Slot, WeightPlace, is_turned
from saccade.errors import StartupError
from saccade.models.network import Derived, Target
from saccade.nn.formats.quantised import Region, WeightFormat
from saccade.nn.parallel import Ranks

PLAIN_DTYPES = ("F64", "F32", "BF16", "F16")
"""The dtypes of plain weights, which are rounded to the network's dtype."""

INTEGERS = ("I32", "I64")
POWERS = "F8_E8M0"
"""The dtype of scales that are powers of two."""

ROUNDING = 1e-5
"""By how much the reference's powers may differ from ours, in addition to the rounding of a tensor's dtype."""


@dataclass(frozen=True)
class LoadPlan:
    """The parameters' *places* and *fillings*, by name, and the caches' scales.

    *spare* counts the tensors of quantised weights that only other arithmetic needs, by the ends of their names.
    """

    places: Mapping[str, WeightPlace]
    fillings: dict[str, list[Filling]] = field(default_factory=lambda: defaultdict(list))
    cache_scales: CacheScales = field(default_factory=CacheScales)
    spare: Counter[str] = field(default_factory=Counter)

    @property
    def num_bytes(self) -> int:
        """The size in bytes of all tensors that fill parameters."""
        return sum(filling.num_bytes for fillings in self.fillings.values() for filling in fillings)

    def is_quantised(self, name: str) -> bool:
        """Return whether a part of the parameter *name* is quantised."""
        return any(filling.format is not None for filling in self.fillings[name])


@dataclass(frozen=True)
class _Faults:
    """A checkpoint's faults, by kind."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    unusable: list[str] = field(default_factory=list)
    contradictory: list[str] = field(default_factory=list)
    excluded: list[str] = field(default_factory=list)

    def check(self, quantisation: Quantisation | None) -> None:
        """Raise StartupError if there is a fault."""
        kinds = (
            ("lacks {} tensors", self.missing),
            ("has {} tensors that the network does not know", self.unexpected),
            ("has {} tensors that cannot be used", self.unusable),
            ("has {} tensors of quantised weights in modules that its configuration leaves plain", self.excluded),
            ("has {} tensors with other values than those that they stand for", self.contradictory),
        )
        sentences = [f"The checkpoint {words.format(len(names))}: {listed(names)}." for words, names in kinds if names]
        if sentences and quantisation is not None:
            sentences.append(f"Weights are read as {quantisation.formats}, from {quantisation.source}.")
        if sentences:
            raise StartupError(" ".join(sentences))


def make_plan(network: nn.Module, checkpoint: Checkpoint, quantisation: Quantisation | None, ranks: Ranks) -> LoadPlan:
    """Return the places and fillings of *network*'s parameters.

    Raises a StartupError that lists tensors that are missing, unexpected, unusable, or at odds with the configuration.
    """
    places = {name: WeightPlace.of(network, name, ranks) for name, _ in network.named_parameters()}
    plan = LoadPlan(places)
    faults = _Faults()
    fillings = list(_fillings(network, checkpoint, quantisation, plan, faults))
    for filling in turned(fillings, places):
        place = places.get(filling.target.parameter)
        if place is None and quantisation is not None and _is_idle_bias(filling, checkpoint, quantisation):
            continue
        if place is None or not place.takes(filling.target):
            for tensor in filling.tensors.values():
                is_excluded = quantisation is not None and quantisation.is_excluded(tensor.name)
                (faults.excluded if is_excluded else faults.unexpected).append(f"{tensor.name} ({tensor.file})")
            continue
        wrong = _wrong(place, filling)
        faults.unusable.extend(wrong)
        faults.missing.extend(_missing_fields(filling))
        if not wrong and place.filled(filling.target):
            faults.contradictory.extend(_contradictions(place, filling, checkpoint))
        plan.fillings[place.name].append(filling)
    for place in places.values():
        plan.fillings[place.name] = _without_copies(network, checkpoint, plan.fillings[place.name])
        _check_slots(place, plan.fillings[place.name], faults)
    faults.check(quantisation)
    return plan


def _fillings(
    network: Any, checkpoint: Checkpoint, quantisation: Quantisation | None, plan: LoadPlan, faults: _Faults
) -> Iterator[Filling]:
    """Yield all fillings, even of unknown parameters. Record the caches' scales and unused tensors in *plan*."""
    quantised: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    formats: dict[str, WeightFormat] = {}
    scales: list[StoredTensor] = []
    siblings: dict[str, str] = {}
    for tensor in checkpoint.tensors.values():
        module, _, _ = tensor.name.rpartition(".")
        if CACHE_SCALE.fullmatch(tensor.name) is not None:
            scales.append(tensor)
            continue
        siblings[module.rpartition(".")[0]] = f"{module}.weight"
        field = None if quantisation is None else field_of(tensor, quantisation)
        if field is not None:
            first = quantised[field.weight].setdefault(field.end, tensor)
            if first is not tensor and not _are_equal(checkpoint, first, tensor):
                faults.unusable.append(f"{first.name} and {tensor.name} are the same weight")
            formats[field.weight] = field.format
        elif isinstance(target := network.locate(tensor.name), Derived):
            faults.contradictory.extend(_differences(tensor, target, checkpoint))
        elif target is not None:
            yield Filling(target, {PLAIN: tensor})
    for weight, fields in quantised.items():
        # Every field of a weight lies where the weight would.
        format, target = formats[weight], network.locate(weight)
        if not isinstance(target, Target):
            continue
        if (place := plan.places.get(target.parameter)) is not None and place.takes(target):
            format = fitted(format, fields, place.row_parts(target))
        by_shape = {end: tensor for end, tensor in fields.items() if end in format.derived}
        used = {end: tensor for end, tensor in fields.items() if end not in (*format.unused, *by_shape)}
        is_plain = not used.keys() - set(format.optional) and not by_shape
        plan.spare.update(fields if is_plain else fields.keys() & set(format.unused))
        if not is_plain:
            yield Filling(target, used, format, by_shape, weight)
    plan.cache_scales.note(scales, network, siblings)
    faults.unexpected.extend(f"{tensor.name} ({tensor.file})" for tensor in plan.cache_scales.unexpected)


def _are_equal(checkpoint: Checkpoint, first: StoredTensor, second: StoredTensor) -> bool:
    """Return whether two tensors of scales, under different names, have the same values."""
    are_known = {first.dtype, second.dtype} <= {*PLAIN_DTYPES, POWERS}
    return are_known and checkpoint.agree(first, second, torch.float32)


def _differences(tensor: StoredTensor, derived: Derived, checkpoint: Checkpoint) -> list[str]:
    """Return the fault of a tensor if it has none of the values that the network computes itself."""
    fault = [f"{tensor.name} ({tensor.file}; not {derived.words})"]
    if tensor.dtype not in PLAIN_DTYPES:
        return fault
    values = checkpoint.read(tensor.name)
    relative, smallest = torch.finfo(values.dtype).eps + ROUNDING, torch.finfo(values.dtype).tiny
    are_equal = (
        values.shape == own.shape and torch.allclose(values.double(), own.double(), relative, smallest)
        for own in derived.values
    )
    return [] if any(are_equal) else fault


def _contradictions(place: WeightPlace, filling: Filling, checkpoint: Checkpoint) -> list[str]:
    """Return the faults of a quantised weight's tensors that lack the values that its shape determines."""
    if filling.format is None:
        return []
    rows, columns = place.checkpoint_shape(filling.target)[-2:]
    faults = []
    for end, tensor in filling.derived.items():
        rule = filling.format.derived[end]
        if tensor.dtype not in INTEGERS or not torch.equal(
            checkpoint.read(tensor.name).long().flatten(), rule.of(rows, columns)
        ):
            faults.append(f"{tensor.name} ({tensor.file}; not {rule.words})")
    return faults


def _without_copies(network: nn.Module, checkpoint: Checkpoint, fillings: list[Filling]) -> list[Filling]:
    """Return *fillings* without plain ones that equal an earlier one, as that of a tied head does."""
    firsts: dict[Target, Filling] = {}
    others = []
    for filling in fillings:
        first = firsts.setdefault(filling.target, filling)
        if first is not filling and not _are_copies(network, checkpoint, first, filling):
            others.append(filling)
    return [*firsts.values(), *others]


def _are_copies(network: nn.Module, checkpoint: Checkpoint, first: Filling, second: Filling) -> bool:
    """Return whether both fillings are plain, and equal in the network's dtype."""
    if first.format is not None or second.format is not None:
        return False
    tensors = first.fields[PLAIN], second.fields[PLAIN]
    dtype = network.get_parameter(first.target.parameter).dtype
    return all(tensor.dtype in PLAIN_DTYPES for tensor in tensors) and checkpoint.agree(*tensors, dtype)


def _is_idle_bias(filling: Filling, checkpoint: Checkpoint, quantisation: Quantisation) -> bool:
    """Return whether a tensor is a bias of zeros, which AutoGPTQ gives every quantised layer."""
    name = next(iter(filling.tensors.values())).name
    module, _, end = name.rpartition(".")
    return end == "bias" and quantisation.format_of(module) is not None and not checkpoint.read(name).any()


def _missing_fields(filling: Filling) -> list[str]:
    """Return the tensors that a quantised weight lacks."""
    if filling.format is None:
        return []
    format = filling.format
    present_or_optional = {*filling.tensors, *format.optional}
    needed = {end: field.dtypes for end, field in format.fields.items()}
    needed |= {end: INTEGERS for end, rule in format.derived.items() if rule.is_needed}
    absent = ((end, dtypes) for end, dtypes in needed.items() if end not in present_or_optional)
    return [f"{field_name(filling.weight, end)} ({' or '.join(dtypes)})" for end, dtypes in absent]


def _wrong(place: WeightPlace, filling: Filling) -> list[str]:
    """Return the faults in shape or dtype that the tensors of *filling* have."""
    target, format = filling.target, filling.format
    expected = place.checkpoint_shape(target)
    if format is None:
        return _unlike(filling.fields[PLAIN], PLAIN_DTYPES, expected)
    fields = [(tensor, format.fields[end]) for end, tensor in filling.fields.items()]
    name = next(iter(filling.tensors.values())).name
    can_transpose = not target.transposed or format.transposed() is not None
    if len(place.shape) != 2 or not can_transpose or not place.holds_formats:
        return [f"{name}: the network does not take {place.name} in a quantised format"]
    *experts, rows, columns = place.checkpoint_shape(target._replace(transposed=False))
    whole = Region(0, rows, 0, columns)
    faults = []
    for tensor, own in fields:
        shape = own.shape(whole)
        stored = (*experts, *(shape[::-1] if is_turned(own, target) else shape))
        # One value for each weight may have further dimensions of 1.
        is_one = own.cell is None and _without_ones(tensor.shape) == _without_ones(stored)
        faults.extend(_unlike(tensor, own.dtypes, tensor.shape if is_one else stored))
    return faults


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _unlike(tensor: StoredTensor, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> list[str]:
    """Return how a tensor differs from *dtypes* and *shape*."""
    faults = []
    if tensor.dtype not in dtypes:
        faults.append(f"{tensor.name} ({tensor.file}) is {tensor.dtype} instead of {' or '.join(dtypes)}")
    if tensor.shape != shape and not (shape == () and prod(tensor.shape) == 1):
        faults.append(f"{tensor.name} ({tensor.file}) has shape {[*tensor.shape]} instead of {[*shape]}")
    return faults


def _check_slots(place: WeightPlace, fillings: list[Filling], faults: _Faults) -> None:
    """Record slots that no tensor or several tensors fill, and parts whose experts have several formats."""
    filled: dict[Slot, Filling] = {}
    for filling in fillings:
        for slot in place.filled(filling.target):
            if slot in filled:
                names = (next(iter(one.tensors.values())).name for one in (filled[slot], filling))
                faults.unusable.append(f"{' and '.join(names)} are the same weight")
            filled[slot] = filling
    faults.missing.extend(_described(place, slot) for slot in place.slots if slot not in filled)
    formats_of: dict[int | None, set[object]] = defaultdict(set)
    for (part, _), filling in filled.items():
        kinds = sorted((end, one.dtype) for end, one in filling.fields.items()) if filling.format is not None else []
        formats_of[part].add((filling.format, *kinds))
    if any(len(kinds) > 1 for kinds in formats_of.values()):
        faults.unusable.append(f"the experts of {place.name} have several formats")


def _described(place: WeightPlace, slot: Slot) -> str:
    """Return a slot's name for an error message."""
    details = [f"{what} {which}" for what, which in zip(("part", "expert"), slot, strict=True) if which is not None]
    return f"{place.name} ({', '.join(details)})" if details else place.name

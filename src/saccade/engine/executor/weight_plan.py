"""Decide, from the headers of a checkpoint's files, which of its tensors fills what of a network. Nothing is read yet.

Every tensor is accounted for: it fills a parameter, or the family or the format declares it as not needed. Every
parameter is filled once. All faults are reported together.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from torch import nn

from saccade.engine.executor.weight_files import Checkpoint, StoredTensor, listed
from saccade.engine.executor.weight_formats import Quantisation
from saccade.engine.executor.weight_places import PLAIN, Filling, Slot, WeightPlace
from saccade.errors import StartupError
from saccade.nn.formats.quantised import Region, WeightFormat
from saccade.nn.parallel import Ranks

PLAIN_DTYPES = ("F64", "F32", "BF16", "F16")
"""How plain weights may be stored; they are rounded to the network's dtype."""

WEIGHT = "weight"
KV_SCALE = re.compile(r"(?P<attention>.*\.layers\.\d+\.[^.]*attn)\.(?:[^.]+\.)?(?P<which>[kv])_scale")
LAYER = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True)
class LoadPlan:
    """The parameters' *places* and *fillings*, by name, and the tensors of *kv_scales*: by layer, and "k" or "v"."""

    places: Mapping[str, WeightPlace]
    fillings: dict[str, list[Filling]] = field(default_factory=lambda: defaultdict(list))
    kv_scales: dict[tuple[int, str], StoredTensor] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors that fill parameters."""
        every = (filling for fillings in self.fillings.values() for filling in fillings)
        return sum(stored.num_bytes for filling in every for stored in filling.fields.values())

    def is_quantised(self, name: str) -> bool:
        """Return whether a part of the parameter is quantised."""
        return any(filling.format is not None for filling in self.fillings[name])


@dataclass(frozen=True)
class _Faults:
    """What is wrong with a checkpoint, by kind."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    unusable: list[str] = field(default_factory=list)

    def check(self, quantisation: Quantisation | None) -> None:
        """Raise StartupError if there is a fault."""
        kinds = (
            ("lacks {} tensors", self.missing),
            ("has {} tensors that the network does not know", self.unexpected),
            ("has {} tensors that cannot be used", self.unusable),
        )
        sentences = [f"The checkpoint {words.format(len(found))}: {listed(found)}." for words, found in kinds if found]
        if sentences and quantisation is not None:
            sentences.append(f"Weights are read as {quantisation.formats}, from {quantisation.source}.")
        if sentences:
            raise StartupError(" ".join(sentences))


def make_plan(network: nn.Module, checkpoint: Checkpoint, quantisation: Quantisation | None, ranks: Ranks) -> LoadPlan:
    """Return what fills each parameter of *network*.

    Raises StartupError, which lists the tensors that are missing, unexpected, or of another shape or dtype.
    """
    places = {name: WeightPlace.of(network, name, ranks) for name, _ in network.named_parameters()}
    plan = LoadPlan(places)
    faults = _Faults()
    for filling in _fillings(network, checkpoint, quantisation, plan):
        place = places.get(filling.target.parameter)
        if place is None or not place.takes(filling.target):
            faults.unexpected.extend(f"{stored.name} ({stored.file})" for stored in filling.fields.values())
            continue
        faults.unusable.extend(_wrong(place, filling))
        faults.missing.extend(_missing_fields(filling))
        plan.fillings[place.name].append(filling)
    for place in places.values():
        _check_slots(place, plan.fillings[place.name], faults)
    faults.check(quantisation)
    return plan


def _fillings(
    network: Any, checkpoint: Checkpoint, quantisation: Quantisation | None, plan: LoadPlan
) -> Iterator[Filling]:
    """Yield all fillings, those of unknown parameters too. Note the scales of caches in *plan*."""
    quantised: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    formats: dict[str, WeightFormat] = {}
    scales: list[StoredTensor] = []
    siblings: dict[str, str] = {}
    for stored in checkpoint.tensors.values():
        module, _, _ = stored.name.rpartition(".")
        if KV_SCALE.fullmatch(stored.name) is not None:
            scales.append(stored)
            continue
        siblings[module.rpartition(".")[0]] = f"{module}.weight"
        found = None if quantisation is None else _field_of(stored, quantisation)
        if found is not None:
            quantised[found.weight][found.end] = stored
            formats[found.weight] = found.format
        elif (target := network.locate(stored.name)) is not None:
            yield Filling(target, {PLAIN: stored})
    for weight, fields in quantised.items():
        # Every field of a weight lies where the weight would.
        format, target = formats[weight], network.locate(weight)
        needed = {end: stored for end, stored in fields.items() if end not in format.unused}
        if needed and target is not None:
            yield Filling(target, needed, (format.transposed() or format) if target.transposed else format)
    for stored in scales:
        _note_kv_scale(stored, network, siblings, plan)


class _FieldOf(NamedTuple):
    """A tensor is the field *end* of the weight that the network's `locate` knows as *weight*, in *format*."""

    weight: str
    end: str
    format: WeightFormat


def _field_of(stored: StoredTensor, quantisation: Quantisation) -> _FieldOf | None:
    """Return of which weight a tensor is a field; None for a plain tensor.

    Weights that the release left plain have other dtypes.
    """
    module, _, end = stored.name.rpartition(".")
    format = quantisation.format_of(module)
    if format is not None and format.joins_experts and len(stored.shape) == 3:
        for last, field_of in sorted(format.fields.items(), reverse=True):
            suffix = last.removeprefix(WEIGHT)
            if stored.dtype in field_of.dtypes and stored.name.endswith(suffix):
                return _FieldOf(stored.name.removesuffix(suffix), last, format)
    if format is None or (end not in format.fields and end not in format.unused):
        return None
    if end == WEIGHT and end in format.fields and stored.dtype not in format.fields[end].dtypes:
        return None
    return _FieldOf(f"{module}.{WEIGHT}", end, format)


def _note_kv_scale(stored: StoredTensor, network: Any, siblings: Mapping[str, str], plan: LoadPlan) -> None:
    """Note the scale of a layer's cached keys or values, unless the layer is not needed, such as a draft layer."""
    if (match := KV_SCALE.fullmatch(stored.name)) is None or (sibling := siblings.get(match["attention"])) is None:
        return
    target = network.locate(sibling)
    if target is not None and (layer := LAYER.search(target.parameter)) is not None:
        plan.kv_scales[int(layer[1]), match["which"]] = stored


def _missing_fields(filling: Filling) -> list[str]:
    """Return the tensors that a quantised weight lacks."""
    if filling.format is None:
        return []
    present, stored = next(iter(filling.fields.items()))
    # Of experts that are joined in one tensor, the names of fields lack the word `weight`.
    is_whole = stored.name.endswith(f".{present}")
    start = stored.name.removesuffix(present if is_whole else present.removeprefix(WEIGHT))
    absent = ((end, field) for end, field in filling.format.fields.items() if end not in filling.fields)
    return [
        f"{start}{end if is_whole else end.removeprefix(WEIGHT)} ({' or '.join(field.dtypes)})" for end, field in absent
    ]


def _wrong(place: WeightPlace, filling: Filling) -> list[str]:
    """Return what is wrong with the shapes and dtypes of the tensors of *filling*."""
    target, format = filling.target, filling.format
    needed = place.needed(target)
    if format is None:
        return _unlike(filling.fields[PLAIN], PLAIN_DTYPES, needed)
    fields = [(stored, format.fields[end]) for end, stored in filling.fields.items()]
    can_transpose = not target.transposed or format.transposed() is not None
    if len(place.shape) != 2 or not can_transpose or not place.holds_formats:
        return [f"{fields[0][0].name}: the network does not take {place.name} in a quantised format"]
    *experts, rows, columns = place.needed(target._replace(transposed=False))
    whole = Region(0, rows, 0, columns)
    shapes = ((stored, field.dtypes, field.shape(whole)) for stored, field in fields)
    return [
        text
        for stored, dtypes, shape in shapes
        for text in _unlike(stored, dtypes, (*experts, *(shape[::-1] if target.transposed else shape)))
    ]


def _unlike(stored: StoredTensor, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> list[str]:
    """Return in what a tensor differs from *dtypes* and *shape*."""
    found = []
    if stored.dtype not in dtypes:
        found.append(f"{stored.name} ({stored.file}) is {stored.dtype} instead of {' or '.join(dtypes)}")
    if stored.shape != shape and not (shape == () and prod(stored.shape) == 1):
        found.append(f"{stored.name} ({stored.file}) has shape {[*stored.shape]} instead of {[*shape]}")
    return found


def _check_slots(place: WeightPlace, fillings: list[Filling], faults: _Faults) -> None:
    """Note slots that nothing fills, or more than one tensor; and parts of which only some experts are quantised."""
    filled: dict[Slot, Filling] = {}
    for filling in fillings:
        for slot in place.filled(filling.target):
            if slot in filled:
                names = (next(iter(one.fields.values())).name for one in (filled[slot], filling))
                faults.unusable.append(f"{' and '.join(names)} are the same weight")
            filled[slot] = filling
    faults.missing.extend(_described(place, slot) for slot in place.slots if slot not in filled)
    stored: dict[int | None, set[tuple[str, ...]]] = defaultdict(set)
    for (part, _), filling in filled.items():
        kinds = (
            ["plain"] if filling.format is None else sorted(f"{end} {one.dtype}" for end, one in filling.fields.items())
        )
        stored[part].add(tuple(kinds))
    if any(len(kinds) > 1 for kinds in stored.values()):
        faults.unusable.append(f"the experts of {place.name} have several formats")


def _described(place: WeightPlace, slot: Slot) -> str:
    """Return the name of a slot for an error."""
    details = [f"{what} {which}" for what, which in zip(("part", "expert"), slot, strict=True) if which is not None]
    return f"{place.name} ({', '.join(details)})" if details else place.name

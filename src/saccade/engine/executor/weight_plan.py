"""Decide, from the headers of a checkpoint's files, which of its tensors fills what of a network. Nothing is read yet.

Every tensor is accounted for: it fills a parameter, or the family or the format declares it as not needed. Every
parameter is filled once. All faults are reported together.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import nn

from saccade.engine.executor.weight_files import Checkpoint, StoredTensor, listed
from saccade.engine.executor.weight_formats import Quantisation
from saccade.engine.executor.weight_places import PLAIN, Filling, Place, Slot
from saccade.errors import StartupError
from saccade.nn.formats.quantised import Region, WeightFormat
from saccade.nn.parallel import Ranks

PLAIN_DTYPES = ("F64", "F32", "BF16", "F16")
"""How plain weights may be stored; they are rounded to the network's dtype."""

KV_SCALE = re.compile(r"(?P<attention>.*\.layers\.\d+\.[^.]*attn)\.(?:[^.]+\.)?(?P<which>[kv])_scale")
LAYER = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True)
class Plan:
    """The parameters' *places* and *fillings*, by name, and the tensors of *kv_scales*: by layer, and "k" or "v"."""

    format: WeightFormat | None
    places: Mapping[str, Place]
    fillings: dict[str, list[Filling]] = field(default_factory=lambda: defaultdict(list))
    kv_scales: dict[tuple[int, str], StoredTensor] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors that fill parameters."""
        every = (filling for fillings in self.fillings.values() for filling in fillings)
        return sum(stored.num_bytes for filling in every for stored in filling.fields.values())

    def is_quantised(self, name: str) -> bool:
        """Return whether a part of the parameter is quantised."""
        return any(filling.is_quantised for filling in self.fillings[name])


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
            sentences.append(f"Weights are read as {quantisation.format.name}, from {quantisation.source}.")
        if sentences:
            raise StartupError(" ".join(sentences))


def make_plan(network: nn.Module, checkpoint: Checkpoint, quantisation: Quantisation | None, ranks: Ranks) -> Plan:
    """Return what fills each parameter of *network*.

    Raises StartupError, which lists the tensors that are missing, unexpected, or of another shape or dtype.
    """
    places = {name: Place.of(network, name, ranks) for name, _ in network.named_parameters()}
    plan = Plan(None if quantisation is None else quantisation.format, places)
    faults = _Faults()
    for filling in _fillings(network, checkpoint, quantisation, plan):
        place = places.get(filling.target.parameter)
        if place is None or not place.takes(filling.target):
            faults.unexpected.extend(f"{stored.name} ({stored.file})" for stored in filling.fields.values())
            continue
        faults.unusable.extend(_wrong(place, filling, plan.format))
        faults.missing.extend(_missing_fields(filling, plan.format))
        plan.fillings[place.name].append(filling)
    for place in places.values():
        _check_slots(place, plan.fillings[place.name], faults)
    faults.check(quantisation)
    return plan


def _fillings(network: Any, checkpoint: Checkpoint, quantisation: Quantisation | None, plan: Plan) -> Iterator[Filling]:
    """Yield all fillings, those of unknown parameters too. Note the scales of caches in *plan*."""
    unused = () if quantisation is None else quantisation.format.unused
    quantised: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    scales: list[StoredTensor] = []
    siblings: dict[str, str] = {}
    for stored in checkpoint.tensors.values():
        module, _, end = stored.name.rpartition(".")
        if KV_SCALE.fullmatch(stored.name) is not None:
            scales.append(stored)
            continue
        siblings[module.rpartition(".")[0]] = f"{module}.weight"
        if quantisation is not None and _is_field(stored, quantisation):
            quantised[module][end] = stored
        elif (target := network.locate(stored.name)) is not None:
            yield Filling(target, {PLAIN: stored})
    for module, fields in quantised.items():
        # Every field of a weight lies where the weight would.
        needed = {end: stored for end, stored in fields.items() if end not in unused}
        if needed and (target := network.locate(f"{module}.weight")) is not None:
            yield Filling(target, needed)
    for stored in scales:
        _note_kv_scale(stored, network, siblings, plan)


def _is_field(stored: StoredTensor, quantisation: Quantisation) -> bool:
    """Return whether a tensor belongs to a quantised weight. Weights that the release left plain have other dtypes."""
    module, _, end = stored.name.rpartition(".")
    known = quantisation.format.fields.get(end)
    if known is None and end not in quantisation.format.unused:
        return False
    if known is not None and end == "weight" and stored.dtype not in known.dtypes:
        return False
    return module not in quantisation.ignored


def _note_kv_scale(stored: StoredTensor, network: Any, siblings: Mapping[str, str], plan: Plan) -> None:
    """Note the scale of a layer's cached keys or values, unless the layer is not needed, such as a draft layer."""
    if (match := KV_SCALE.fullmatch(stored.name)) is None or (sibling := siblings.get(match["attention"])) is None:
        return
    target = network.locate(sibling)
    if target is not None and (layer := LAYER.search(target.parameter)) is not None:
        plan.kv_scales[int(layer[1]), match["which"]] = stored


def _missing_fields(filling: Filling, format: WeightFormat | None) -> list[str]:
    """Return the tensors that a quantised weight lacks."""
    if not filling.is_quantised or format is None:
        return []
    (module,) = {stored.name.rpartition(".")[0] for stored in filling.fields.values()}
    absent = ((end, field) for end, field in format.fields.items() if end not in filling.fields)
    return [f"{module}.{end} ({' or '.join(field.dtypes)})" for end, field in absent]


def _wrong(place: Place, filling: Filling, format: WeightFormat | None) -> list[str]:
    """Return what is wrong with the shapes and dtypes of the tensors of *filling*."""
    needed = place.needed(filling.target)
    if not filling.is_quantised:
        return _unlike(filling.fields[PLAIN], PLAIN_DTYPES, needed)
    fields = [(stored, format.fields[end]) for end, stored in filling.fields.items() if format is not None]
    if len(needed) != 2 or filling.target.transposed or not place.holds_formats:
        return [f"{fields[0][0].name}: the network does not take {place.name} in a quantised format"]
    whole = Region(0, needed[0], 0, needed[1])
    return [text for stored, field in fields for text in _unlike(stored, field.dtypes, field.shape(whole))]


def _unlike(stored: StoredTensor, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> list[str]:
    """Return in what a tensor differs from *dtypes* and *shape*."""
    found = []
    if stored.dtype not in dtypes:
        found.append(f"{stored.name} ({stored.file}) is {stored.dtype} instead of {' or '.join(dtypes)}")
    if stored.shape != shape and not (shape == () and prod(stored.shape) == 1):
        found.append(f"{stored.name} ({stored.file}) has shape {[*stored.shape]} instead of {[*shape]}")
    return found


def _check_slots(place: Place, fillings: list[Filling], faults: _Faults) -> None:
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
            sorted(f"{end} {one.dtype}" for end, one in filling.fields.items()) if filling.is_quantised else ["plain"]
        )
        stored[part].add(tuple(kinds))
    if any(len(kinds) > 1 for kinds in stored.values()):
        faults.unusable.append(f"the experts of {place.name} have several formats")


def _described(place: Place, slot: Slot) -> str:
    """Return the name of a slot for an error."""
    details = [f"{what} {which}" for what, which in zip(("part", "expert"), slot, strict=True) if which is not None]
    return f"{place.name} ({', '.join(details)})" if details else place.name

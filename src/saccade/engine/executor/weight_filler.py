"""Read a plan's tensors into a network's parameters, or into holders of quantised weights.

If a tensor is cut over ranks, only the rank's part is read. Files are mapped into memory, so reading takes no memory in
addition to the parameters.
"""

from collections.abc import Callable, Iterable
from zlib import crc32

import torch
from torch import nn

from saccade.engine.executor.weight_files import STORED_DTYPES, Checkpoint
from saccade.engine.executor.weight_places import PLAIN, Filling, WeightPlace, field_slices, is_turned
from saccade.engine.executor.weight_plan import LoadPlan
from saccade.nn.cores import map_on_cores
from saccade.nn.formats.quantised import Part, QuantisedWeight
from saccade.nn.parallel import PartSlice

STAGE = "loading weights"

Progress = Callable[[str, int, int], None]
"""Called with the name of a stage, and its done and total units."""

OnFilled = Callable[[str], None]
"""Called with the name of each module that has its weights. Each thread fills one module at a time."""


def fill(
    network: nn.Module,
    plan: LoadPlan,
    checkpoint: Checkpoint,
    device: torch.device,
    progress: Progress,
    on_filled: OnFilled = lambda _: None,
) -> None:
    """Create *network*'s parameters on *device* and fill them according to *plan*, layer by layer.

    *progress* counts bytes. It is called at the start, at the end, and in between at most once for each hundredth.
    """

    def fill_layer(owner: str) -> int:
        # A quantised weight is held with the layer's bias, which must be there before.
        names = sorted(layers[owner], key=plan.is_quantised)
        num_bytes = sum(_fill_parameter(network, plan, name, checkpoint, device) for name in names)
        on_filled(owner)
        return num_bytes

    layers = _by_owner(plan.places)
    total, num_bytes, reported = plan.num_bytes, 0, 0
    progress(STAGE, 0, total)
    for size in map_on_cores(fill_layer, layers, device):
        num_bytes += size
        if num_bytes - reported > total // 100:
            reported = num_bytes
            progress(STAGE, num_bytes, total)
    progress(STAGE, total, total)


def fill_randomly(
    network: nn.Module, device: torch.device, progress: Progress, on_filled: OnFilled = lambda _: None
) -> None:
    """Create *network*'s parameters on *device* with random values, layer by layer.

    They depend on the parameter's name and shape, so that ranks agree about what they share. Vectors are 1, biases 0,
    and matrices random, so that activations keep their size from layer to layer.
    """
    layers = _by_owner(name for name, _ in network.named_parameters())
    for done, (owner, names) in enumerate(layers.items()):
        progress("making random weights", done, len(layers))
        for name in names:
            parameter = _allocate(network, name, device)
            if parameter.ndim < 2:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                bound = (3 / parameter[0].numel()) ** 0.5
                generator = torch.Generator(device).manual_seed(crc32(name.encode()))
                parameter.uniform_(-bound, bound, generator=generator)
        on_filled(owner)


def _by_owner(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of parameters by that of the module that has them, in order."""
    by_owner: dict[str, list[str]] = {}
    for name in names:
        by_owner.setdefault(name.rpartition(".")[0], []).append(name)
    return by_owner


def _fill_parameter(network: nn.Module, plan: LoadPlan, name: str, checkpoint: Checkpoint, device: torch.device) -> int:
    """Create and fill the parameter *name*, and return the size in bytes of the tensors that were read."""
    place, quantised, fillings = plan.places[name], plan.is_quantised(name), plan.fillings[name]
    parameter = _allocate(network, name, device, is_empty=quantised)
    parts = {} if quantised else dict(enumerate(_views(place, parameter)))
    for filling in fillings:
        _read(filling, place, parts, parameter, checkpoint)
    if quantised:
        owner, _, own_name = name.rpartition(".")
        network.get_submodule(owner).hold(own_name, tuple(parts[part] for part in sorted(parts)))  # type: ignore[operator]
    return sum(filling.num_bytes for filling in fillings)


def _allocate(network: nn.Module, name: str, device: torch.device, *, is_empty: bool = False) -> torch.Tensor:
    """Create the parameter *name* on *device*, without rows if it *is_empty*, and return its values."""
    # Module.to_empty would import sympy, which takes 0.2 s.
    owner, _, own_name = name.rpartition(".")
    unfilled = network.get_parameter(name)
    shape = (0, *unfilled.shape[1:]) if is_empty else unfilled.shape
    values = torch.empty(shape, dtype=unfilled.dtype, device=device)
    setattr(network.get_submodule(owner), own_name, nn.Parameter(values, requires_grad=False))
    return values


def _views(place: WeightPlace, parameter: torch.Tensor) -> tuple[Part, ...]:
    """Return the parts of a plain parameter."""
    if not parameter.ndim:
        return (parameter,)
    dim = place.sharding.dim + (place.experts is not None)
    return parameter.split_with_sizes(place.sharding.lengths(), dim)


def _holder(place: WeightPlace, cut: PartSlice, filling: Filling, parameter: torch.Tensor) -> Part:
    """Return unfilled tensors for one part."""
    experts = () if place.experts is None else (len(place.own_experts),)
    region, format = place.region(cut), filling.format
    if format is None:
        return parameter.new_empty((*experts, region.num_rows, region.num_columns))
    fields = {
        end: parameter.new_empty((*experts, *format.fields[end].shape(region)), dtype=STORED_DTYPES[tensor.dtype])
        for end, tensor in filling.fields.items()
    }
    return QuantisedWeight(format, fields, region)


def _read(
    filling: Filling, place: WeightPlace, parts: dict[int, Part], parameter: torch.Tensor, checkpoint: Checkpoint
) -> None:
    """Copy this rank's pieces of *filling* into *parts*, and create quantised parts that are missing."""
    target = filling.target
    for cut in place.cuts(target):
        for index, expert in enumerate(place.own_experts):
            if target.expert not in (None, expert):
                continue
            if cut.part not in parts:
                parts[cut.part] = _holder(place, cut, filling, parameter)
            part = parts[cut.part]
            if isinstance(part, QuantisedWeight):
                fields = [(end, values, part.format.fields[end]) for end, values in part.fields.items()]
                pieces = [
                    (
                        values,
                        filling.fields[end],
                        field_slices(field, part.region, target, expert),
                        is_turned(field, target),
                    )
                    for end, values, field in fields
                ]
            else:
                pieces = [(part, filling.fields[PLAIN], place.slices(cut, target, expert), target.transposed)]
            for values, tensor, slices, turned in pieces:
                source = checkpoint.read(tensor.name, slices)
                source = source.transpose(-1, -2) if turned else source
                into = values if expert is None else values[index]
                into.copy_(source.reshape(into.shape))

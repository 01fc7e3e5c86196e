"""Read a plan's tensors into a network's parameters, or into holders of quantised weights.

If a tensor is cut over ranks, only the rank's part is read. Files are mapped into memory, so reading takes no memory in
addition to the parameters.
"""

from collections.abc import Callable
from zlib import crc32

import torch
from torch import nn

from saccade.engine.executor.weight_files import STORED_DTYPES, Checkpoint
from saccade.engine.executor.weight_places import PLAIN, Filling, WeightPlace, field_slices, is_turned
from saccade.engine.executor.weight_plan import LoadPlan
from saccade.nn.formats.quantised import Part, QuantisedWeight
from saccade.nn.parallel import PartSlice

STAGE = "loading weights"

Progress = Callable[[str, int, int], None]
"""Called with the name of a stage, and its done and total units."""


def fill(network: nn.Module, plan: LoadPlan, checkpoint: Checkpoint, device: torch.device, progress: Progress) -> None:
    """Create *network*'s parameters on *device* and fill them according to *plan*.

    *progress* counts bytes. It is called at the start, at the end, and in between at most once for each hundredth.
    """
    for name in filter(plan.is_quantised, plan.places):
        owner, _, own_name = name.rpartition(".")
        unfilled = network.get_parameter(name)
        empty = nn.Parameter(unfilled.new_empty(0, *unfilled.shape[1:]), requires_grad=False)
        setattr(network.get_submodule(owner), own_name, empty)
    _allocate(network, device)
    total, num_bytes, reported = plan.num_bytes, 0, 0
    progress(STAGE, 0, total)
    for name, place in plan.places.items():
        parameter = network.get_parameter(name).data
        quantised = plan.is_quantised(name)
        parts = {} if quantised else dict(enumerate(_views(place, parameter)))
        for filling in plan.fillings[name]:
            _read(filling, place, parts, parameter, checkpoint)
            num_bytes += filling.num_bytes
            if num_bytes - reported > total // 100:
                reported = num_bytes
                progress(STAGE, num_bytes, total)
        if quantised:
            owner, _, own_name = name.rpartition(".")
            network.get_submodule(owner).hold(own_name, tuple(parts[part] for part in sorted(parts)))  # type: ignore[operator]
    progress(STAGE, total, total)


def fill_randomly(network: nn.Module, device: torch.device, progress: Progress) -> None:
    """Create *network*'s parameters on *device* with random values.

    They depend on the parameter's name and shape, so that ranks agree about what they share. Vectors are 1, biases 0,
    and matrices random, so that activations keep their size from layer to layer.
    """
    _allocate(network, device)
    parameters = list(network.named_parameters())
    for done, (name, parameter) in enumerate(parameters):
        progress("making random weights", done, len(parameters))
        if parameter.ndim < 2:
            parameter.data.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            bound = (3 / parameter[0].numel()) ** 0.5
            generator = torch.Generator(device).manual_seed(crc32(name.encode()))
            parameter.data.uniform_(-bound, bound, generator=generator)


def _allocate(network: nn.Module, device: torch.device) -> None:
    """Create the parameters on *device*. Module.to_empty would import sympy, which takes 0.2 s."""
    for module in network.modules():
        for name, parameter in module.named_parameters(recurse=False):
            storage = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            setattr(module, name, nn.Parameter(storage, requires_grad=False))


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

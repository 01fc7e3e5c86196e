"""Find the weight that a checkpoint's tensor belongs to, and which part of it the tensor is, by the tensor's name."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from saccade.engine.executor.quantisation import Quantisation
from saccade.engine.executor.weight_files import StoredTensor
from saccade.nn.formats.fp8 import Fp8
from saccade.nn.formats.quantised import WHOLE_ROW, WeightFormat

WEIGHT = "weight"
JOINED = re.compile(r"(?P<weight>.*\.experts\.(?:gate_up|down)_proj)(?:_(?P<end>\w+))?")
"""A tensor of the matrices of all experts of a layer; the names of its fields may lack the word `weight`."""


class FieldOf(NamedTuple):
    """Says that a tensor is the field *end* of a weight in *format*; the network's `locate` knows the name *weight*."""

    weight: str
    end: str
    format: WeightFormat


def field_of(tensor: StoredTensor, quantisation: Quantisation) -> FieldOf | None:
    """Return the weight that a tensor belongs to, and its field; None for a plain tensor.

    A weight is plain if its dtype is none of the format's.
    """
    joined = JOINED.fullmatch(tensor.name)
    if joined is not None:
        module = weight = joined["weight"]
        ends = [f"{WEIGHT}_{joined['end']}", joined["end"]] if joined["end"] else [WEIGHT]
    else:
        module, _, last = tensor.name.rpartition(".")
        weight, ends = f"{module}.{WEIGHT}", [last]
    format = quantisation.format_of(module)
    if format is None or (joined is not None and not format.joins_experts):
        return None
    known = {*format.fields, *format.unused, *format.derived}
    end = next((one for name in ends if (one := format.aliases.get(name, name)) in known), None)
    if end is None or (end == WEIGHT and end in format.fields and tensor.dtype not in format.fields[end].dtypes):
        return None
    return FieldOf(weight, end, format)


def field_name(weight: str, end: str) -> str:
    """Return the name of the tensor that is the field *end* of *weight*."""
    module, _, last = weight.rpartition(".")
    return f"{module}.{end}" if last == WEIGHT else weight + end.removeprefix(WEIGHT)


def fitted(format: WeightFormat, fields: Mapping[str, StoredTensor], parts: Sequence[int]) -> WeightFormat:
    """Return *format* fitted to the shapes of *fields*: a weight may have a scale for each of its *parts*.

    *parts* are the rows of each matrix that the weight joins, and must be equal. For joined experts, transformers
    stores one scale for gate and one for up, and some tools store one for each row. Any other number of scales is left
    as a wrong shape.
    """
    if not isinstance(format, Fp8) or format.cell is not None or not {WEIGHT, format.scale} <= fields.keys():
        return format
    shape, scales = fields[WEIGHT].shape, fields[format.scale].shape
    if len(shape) != len(scales) or len(shape) < 2 or scales[-1] != 1 or scales[-2] < 2:
        return format
    rows_by_count = {shape[-2]: 1}
    if len({*parts}) == 1 and sum(parts) == shape[-2]:
        rows_by_count[len(parts)] = parts[0]
    rows = rows_by_count.get(scales[-2])
    return format if rows is None else Fp8((rows, WHOLE_ROW), format.scale)

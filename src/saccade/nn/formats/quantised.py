"""Weights that stay quantised in memory, and are dequantised when they are used.

A format stores a weight [O, I] in several tensors, its fields. A value of a field belongs to a cell of the weight. A
cell is, for example, eight columns of one row, a block of 128 x 128, or the whole weight. A rank's shard of a weight is
a region of it. The rank holds every cell that the region touches, so a region may begin and end inside a cell. Values
are computed in float32 and rounded once, to the network's dtype.

Shapes: O rows and I columns of a weight, N tokens, E experts of this rank.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple, Protocol

import torch
from torch.nn import functional

from saccade.nn.ops import Activation, PackedLinear

DEQUANTISED_AT_ONCE = 1 << 18
"""Values that are dequantised at a time on a CPU: their copies in float32 fit into a processor's caches.

On other devices a matrix is dequantised at once: each piece would launch several kernels.
"""

WHOLE_ROW = 1 << 40
"""The columns of a cell that is a whole row of the weight."""

PLAIN_KIND = "plain"
"""What stands for the kind of a format if there is none."""

Cell = tuple[int, int]
"""The rows and columns of a weight that share one value of a field."""


class Region(NamedTuple):
    """Rows [row, row + num_rows) and columns [column, column + num_columns) of a weight."""

    row: int
    num_rows: int
    column: int
    num_columns: int


class WeightField(NamedTuple):
    """A tensor that stores part of a weight. *dtypes* are those that checkpoints may have, by their safetensors names.

    A value belongs to *cell*, rows x columns of the weight, and the tensor is [ceil(O / rows), ceil(I / columns)]. The
    *cell* is None if one value, [] or [1], is for the whole weight. With *is_transposed*, the checkpoint's tensor has
    the two dimensions in the other order; in memory they are in this one.
    """

    dtypes: tuple[str, ...]
    cell: Cell | None
    is_transposed: bool = False

    def slices(self, region: Region) -> tuple[slice, ...]:
        """Return the part of the tensor whose cells *region* touches."""
        if self.cell is None:
            return ()
        rows, columns = self.cell
        return (
            slice(region.row // rows, -(-(region.row + region.num_rows) // rows)),
            slice(region.column // columns, -(-(region.column + region.num_columns) // columns)),
        )

    def shape(self, region: Region) -> tuple[int, ...]:
        """Return the shape of the part that *region* touches."""
        return tuple(part.stop - part.start for part in self.slices(region))


class DerivedValues(NamedTuple):
    """An integer tensor that a weight's shape determines: *words* describe the rule, and *of* computes it for [O, I].

    A checkpoint may lack it unless it *is_needed*.
    """

    words: str
    of: Callable[[int, int], torch.Tensor]
    is_needed: bool = False


class WeightFormat(Protocol):
    """The form of a weight in a checkpoint.

    *kind* names the kernels that take it. *fields* are keyed by the suffixes of their tensors' names; a checkpoint may
    lack those in *optional*. Tensors with a suffix in *unused* belong to the weight, but only other arithmetic needs
    them. Those in *derived* must have the values that follow from the shape. *aliases* map other suffixes to the usual
    ones. With *joins_experts*, some releases store a matrix of all experts in one tensor.
    """

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str: ...

    @property
    def fields(self) -> Mapping[str, WeightField]: ...

    @property
    def optional(self) -> tuple[str, ...]: ...

    @property
    def unused(self) -> tuple[str, ...]: ...

    @property
    def aliases(self) -> Mapping[str, str]: ...

    @property
    def derived(self) -> Mapping[str, DerivedValues]: ...

    @property
    def joins_experts(self) -> bool: ...

    def transposed(self) -> "WeightFormat | None":
        """Return the format of a weight [O, I] whose fields are stored as those of [I, O]; None if there is none."""

    def dequantise(self, fields: Mapping[str, torch.Tensor], region: Region) -> torch.Tensor:
        """Return the values [O, I] of *region* in float32, from the parts of *fields* that it touches."""


@dataclass(frozen=True)
class QuantisedWeight:
    """A region of a weight in *format*, or of each expert's weight; *fields* then have a first dimension E."""

    format: WeightFormat
    fields: Mapping[str, torch.Tensor]
    region: Region

    @property
    def nbytes(self) -> int:
        """The size of the fields in bytes."""
        return sum(field.nbytes for field in self.fields.values())

    @property
    def num_values(self) -> int:
        """The number of values, of all experts if there are several."""
        field = next(iter(self.fields.values()))
        num_experts = len(field) if field.ndim == 3 else 1
        return num_experts * self.region.num_rows * self.region.num_columns

    def expert(self, index: int) -> "QuantisedWeight":
        """Return the weight of one expert."""
        return replace(self, fields={name: field[index] for name, field in self.fields.items()})

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the values [O, I]; on a CPU by blocks of rows."""
        region = self.region
        device = next(iter(self.fields.values())).device
        step = max(1, DEQUANTISED_AT_ONCE // region.num_columns)
        if device.type != "cpu" or step >= region.num_rows:
            return self._values().to(dtype).contiguous()
        output_OI = torch.empty(region.num_rows, region.num_columns, dtype=dtype, device=device)
        for start, block_OI in zip(range(0, region.num_rows, step), output_OI.split(step), strict=True):
            block_OI.copy_(self.rows(start, len(block_OI))._values())
        return output_OI

    def rows(self, start: int, count: int) -> "QuantisedWeight":
        """Return rows [start, start + count) of the region."""
        region = self.region._replace(row=self.region.row + start, num_rows=count)
        fields = {}
        for name, values in self.fields.items():
            field = self.format.fields[name]
            if field.cell is None:
                fields[name] = values
            else:
                first = self.region.row // field.cell[0]
                rows, _ = field.slices(region)
                fields[name] = values[rows.start - first : rows.stop - first]
        return replace(self, fields=fields, region=region)

    def _values(self) -> torch.Tensor:
        """Return all values in float32."""
        return self.format.dequantise(self.fields, self.region)


Part = QuantisedWeight | torch.Tensor
"""Consecutive rows of a weight, in a format or as they are."""


def kinds_of(parts: Sequence[Part]) -> set[str]:
    """Return the kinds of the formats in *parts*; a plain tensor has PLAIN_KIND."""
    return {part.format.kind if isinstance(part, QuantisedWeight) else PLAIN_KIND for part in parts}


def growth(parts: Sequence[Part], dtype: torch.dtype) -> int:
    """Return how many bytes more the values of *parts* would take in *dtype*."""
    quantised = [part for part in parts if isinstance(part, QuantisedWeight)]
    return sum(part.num_values * dtype.itemsize - part.nbytes for part in quantised)


def num_rows(part: Part) -> int:
    """Return the number of rows O of *part*."""
    return part.region.num_rows if isinstance(part, QuantisedWeight) else part.shape[-2]


@dataclass(frozen=True)
class QuantisedLinear(PackedLinear):
    """PackedLinear whose weight consists of *parts*, one below the other; at least one of them is quantised.

    Joined layers keep their own scales, and a layer that the checkpoint does not quantise stays plain.
    """

    parts: tuple[Part, ...]
    bias_O: torch.Tensor | None

    def apply(self, x_NI: torch.Tensor, activation: Activation | None) -> torch.Tensor:
        """Return activation(x W^T + b) [N, O]."""
        output_NO = functional.linear(x_NI, self.dequantised(x_NI.dtype), self.bias_O)
        return output_NO if activation is None else activation(output_NO)

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight [O, I]."""
        return _joined(self.parts, dtype)

    @property
    def by_kind(self) -> list["QuantisedLinear"]:
        """The layers that this one joins: of successive parts in formats of one kind, each with its own bias."""
        layers, first = [], 0
        for _, parts in groupby(self.parts, key=lambda part: kinds_of([part])):
            some = tuple(parts)
            count = sum(num_rows(part) for part in some)
            bias_O = None if self.bias_O is None else self.bias_O[first : first + count]
            layers.append(QuantisedLinear(some, bias_O))
            first += count
        return layers

    def reordered(self, order_O: torch.Tensor) -> QuantisedWeight | None:
        """Return the weight with its rows in *order_O* int64; None if parts differ in format or rows share values."""
        weights = [part for part in self.parts if isinstance(part, QuantisedWeight)]
        form = weights[0].format
        cells = [form.fields[end].cell for end in weights[0].fields]
        is_of_rows = all(cell is not None and cell[0] == 1 for cell in cells)
        if not is_of_rows or len(weights) < len(self.parts) or any(weight.format != form for weight in weights):
            return None
        fields = {end: torch.cat([weight.fields[end] for weight in weights])[order_O] for end in weights[0].fields}
        return QuantisedWeight(form, fields, weights[0].region._replace(row=0, num_rows=len(order_O)))


@dataclass(frozen=True)
class QuantisedExperts:
    """Implements nn.ops.ExpertMatrices: the weights of *num_experts* experts, each of *parts* one below the other."""

    parts: tuple[Part, ...]
    num_experts: int
    dtype: torch.dtype

    def __len__(self) -> int:
        return self.num_experts

    def __getitem__(self, expert: int, /) -> torch.Tensor:
        """Return the weight [O, I] of one expert."""
        return _joined(self.expert(expert), self.dtype)

    def expert(self, expert: int) -> tuple[Part, ...]:
        """Return the parts of one expert's weight."""
        return tuple(part.expert(expert) if isinstance(part, QuantisedWeight) else part[expert] for part in self.parts)


def _joined(parts: Sequence[Part], dtype: torch.dtype) -> torch.Tensor:
    plain = [part.dequantised(dtype) if isinstance(part, QuantisedWeight) else part.to(dtype) for part in parts]
    return stacked(plain)


def stacked(parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Return *parts* side by side along *dim*; one part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)  # type: ignore[arg-type]


def looked_up(bytes_OB: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of bytes. *table* is [256] for one value per byte, or [256, 2] for two side by side.

    On a CPU this is several times faster than shifts, masks and casts.
    """
    # A pair is gathered as one number of eight bytes.
    rows = table if table.ndim == 1 else table.view(torch.int64).squeeze(1)
    return rows.index_select(0, bytes_OB.flatten().int()).view(torch.float32).view(len(bytes_OB), -1)


def scaled(
    values_OI: torch.Tensor, scales: torch.Tensor, cell: Cell, region: Region, zeros_OC: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply *values_OI*, the values of *region*, by the scales of their cells, all float32.

    *zeros_OC*, one for each row and each cell's columns, are subtracted first.
    """
    rows = cell[0]
    # A whole row is one cell.
    columns = min(cell[1], region.column + region.num_columns)
    row = torch.arange(region.row, region.row + region.num_rows, device=scales.device)
    scales_OC = scales.index_select(-2, row // rows - region.row // rows)
    # Columns are filled up to whole cells, so that one multiplication serves all.
    before = region.column % columns
    after = -(region.column + region.num_columns) % columns
    whole = functional.pad(values_OI, (before, after)) if before or after else values_OI
    values_OCX: torch.Tensor = whole.unflatten(-1, (-1, columns))
    if zeros_OC is not None:
        values_OCX = values_OCX - zeros_OC.unsqueeze(-1)
    product: torch.Tensor = (values_OCX * scales_OC.unsqueeze(-1)).flatten(-2)
    return product.narrow(-1, before, region.num_columns)

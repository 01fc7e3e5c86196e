"""Products with INT4 weights in groups on a CPU: PyTorch's kernel for few tokens, and unpacked weights for many.

`_weight_int4pack_mm_for_cpu` takes bfloat16 activations and weights (code - 8) * scale + zero; scales and zeros are
bfloat16. It reads a quarter of a bfloat16 weight's bytes, but multiplies more slowly than oneDNN. Shapes: N tokens, I
inputs, O outputs, P outputs with padding, G groups of columns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

import torch

from saccade.nn.cpu import multiplies_bfloat16
from saccade.nn.formats.packed_ints import PackedInts
from saccade.nn.formats.products import Product
from saccade.nn.formats.quantised import QuantisedLinear, QuantisedWeight, stacked
from saccade.nn.libraries import Unavailable

GROUP_SIZES = (256, 128, 64, 32)
MIDDLE = 8
"""The code that the kernel takes for zero."""

PADDING = 64
"""Outputs are padded to whole blocks of the packed layout, on any processor."""

CROSSING, CROSSING_BF16 = 256, 112
"""From how many tokens on a weight is unpacked and multiplied as a plain one.

Measured with AVX2 in float32; and in bfloat16 with AVX512, which multiplies plain weights faster.
"""

NUMBERS: Mapping[torch.dtype, tuple[torch.dtype, int, int]] = MappingProxyType(
    {torch.bfloat16: (torch.int16, 0x4300, 1 << 7), torch.float32: (torch.int32, 0x4B000000, 1 << 23)}
)
"""For each dtype: integers of its size, and the power of two, as bits and value, whose last place is worth one.

Four bits in the last places of this power are added to it. So codes become floats without a conversion.
"""

OUTPUTS_AT_ONCE = 512
"""How many outputs are unpacked at a time: their copies fit into the processor's cache, or nearly."""

PACKED_AT_ONCE = 1 << 18
"""Values that are packed at a time: their copies in 32 bits fit into the caches of two cores."""


@dataclass(frozen=True)
class CpuInt4(Product):
    """An INT4 linear layer: *packed* uint8 [P, I / 2] is in PyTorch's layout, *scales_and_zeros_GP2* are bfloat16.

    It has *num_outputs* O. Blocks of *block_rows* outputs can be unpacked; with 0, the layout is not known, and the
    kernel serves any number of tokens. Without *has_zeros*, every zero point is 0.
    """

    packed: torch.Tensor
    scales_and_zeros_GP2: torch.Tensor
    group_size: int
    block_rows: int
    num_outputs: int
    has_zeros: bool
    bias_O: torch.Tensor | None

    def product(self, x_NI: torch.Tensor) -> torch.Tensor:
        """Return x W^T [N, O]."""
        if self.block_rows and len(x_NI) >= crossing(x_NI.dtype):
            return self._by_unpacking(x_NI)
        output_NP = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x_NI.bfloat16(), self.packed, self.group_size, self.scales_and_zeros_GP2
        )
        return output_NP[:, : self.num_outputs].to(x_NI.dtype)  # type: ignore[no-any-return]

    def _by_unpacking(self, x_NI: torch.Tensor) -> torch.Tensor:
        output_NP = x_NI.new_empty(len(x_NI), len(self.packed))
        for start in range(0, len(self.packed), OUTPUTS_AT_ONCE):
            some = slice(start, start + OUTPUTS_AT_ONCE)
            self.put_in_order(x_NI @ self.unpacked(some, x_NI.dtype), output_NP[:, some])
        return output_NP[:, : self.num_outputs]

    def unpacked(self, some: slice, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights [I, outputs] of *some* outputs, which must be whole blocks, in the order of planes.

        Words are as wide as *dtype*. A byte has a column of two outputs, half a block from each other. A plane has one
        such half of one byte of all words, so that it is computed without reordering.
        """
        word, bits, power = NUMBERS[dtype]
        num_inputs, num_planes = 2 * self.packed.shape[1], 2 * word.itemsize
        words_BIJ = self.packed[some].view(-1, num_inputs, self.block_rows // 2).view(word)
        words_IBJ = words_BIJ.transpose(0, 1).contiguous()
        codes = torch.empty(num_inputs, num_planes, *words_IBJ.shape[1:], dtype=word)
        for plane in range(num_planes):
            torch.bitwise_right_shift(words_IBJ, 4 * plane, out=codes[:, plane])
        values = codes.bitwise_and_(15).bitwise_or_(bits).view(dtype).sub_(power + MIDDLE)
        pairs_GP2 = self.scales_and_zeros_GP2[:, some].to(dtype)
        scales_G1P, zeros_G1P = self._in_planes(pairs_GP2, word.itemsize).unsqueeze(2)
        values_GCP = values.view(len(pairs_GP2), self.group_size, -1).mul_(scales_G1P)
        if self.has_zeros:
            values_GCP += zeros_G1P
        return values_GCP.flatten(0, 1)

    def _in_planes(self, pairs_GP2: torch.Tensor, itemsize: int) -> torch.Tensor:
        """Return the scales and zeros [2, G, P] of whole blocks, in the order of planes."""
        return pairs_GP2.unflatten(1, self._places(itemsize)).permute(5, 0, 4, 2, 1, 3).flatten(2)  # type: ignore[no-any-return]

    def put_in_order(self, planes_NP: torch.Tensor, output_NP: torch.Tensor) -> None:
        """Copy outputs of whole blocks from the order of planes to their own."""
        itemsize = planes_NP.itemsize
        ordered = output_NP.unflatten(1, self._places(itemsize)).permute(0, 4, 2, 1, 3)
        ordered.copy_(planes_NP.view(ordered.shape))

    def _places(self, itemsize: int) -> tuple[int, ...]:
        """Return the sizes of blocks, halves of a block, words and bytes, of which outputs consist."""
        return -1, 2, self.block_rows // 2 // itemsize, itemsize


def crossing(dtype: torch.dtype) -> int:
    """Return from how many tokens on weights are unpacked on this processor."""
    return CROSSING_BF16 if dtype == torch.bfloat16 and multiplies_bfloat16() else CROSSING


def pack_linear(layer: QuantisedLinear) -> CpuInt4:
    """Return the product for *layer*, whose parts are all PackedInts of four bits. Raises Unavailable."""
    weights = [part for part in layer.parts if isinstance(part, QuantisedWeight)]
    size = _group_size(weights)
    numbers = [_numbers(weight, size) for weight in weights]
    codes_OI = stacked([codes for codes, _ in numbers])
    scales_and_zeros_GO2 = stacked([pairs for _, pairs in numbers], 1)
    padding = -len(codes_OI) % PADDING
    packed = torch.empty(len(codes_OI) + padding, codes_OI.shape[1] // 2, dtype=torch.uint8)
    step = _rows_at_once(codes_OI.shape[1])
    for some, into in zip(codes_OI.split(step), packed.split(step), strict=True):
        into.copy_(_packed(some))
    padded = torch.nn.functional.pad(scales_and_zeros_GO2, (0, 0, 0, padding))
    has_zeros = bool(padded[..., 1].any())
    return CpuInt4(packed, padded, size, block_rows(), len(codes_OI), has_zeros, layer.bias_O)


def _rows_at_once(num_columns: int) -> int:
    """Return how many outputs, in whole blocks, are packed at a time."""
    return max(1, PACKED_AT_ONCE // num_columns // PADDING) * PADDING


def _group_size(weights: Sequence[QuantisedWeight]) -> int:
    """Return the kernel's largest group size for which each group lies within one group of each weight.

    Raises Unavailable if there is none.
    """
    for size in GROUP_SIZES:
        if all(
            isinstance(weight.format, PackedInts)
            and weight.region.column % size == 0
            and weight.region.num_columns % size == 0
            and weight.format.group_size % size == 0
            for weight in weights
        ):
            return size
    raise Unavailable(f"its groups or columns are no multiples of {GROUP_SIZES[-1]}")


def _numbers(weight: QuantisedWeight, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes uint8 [O, I], and bfloat16 scales and zeros [G, O, 2] of groups of *size* columns."""
    form, region = weight.format, weight.region
    if not isinstance(form, PackedInts):
        raise TypeError(f"{form.name} has no packed integers.")
    codes_OI = torch.empty(region.num_rows, region.num_columns, dtype=torch.uint8)
    pairs = []
    first = torch.arange(region.column, region.column + region.num_columns, size)
    step = _rows_at_once(region.num_columns)
    for start, into in zip(range(0, region.num_rows, step), codes_OI.split(step), strict=True):
        rows = weight.rows(start, len(into))
        some_OI, scales_OG, zeros_OG = form.codes(rows.fields, rows.region)
        into.copy_(some_OI)
        # Longer groups are repeated.
        groups = first // form.group_size - region.column // form.group_size
        scales_GO = scales_OG[:, groups].t().bfloat16()
        zeros_GO = (MIDDLE - zeros_OG[:, groups].t()) * scales_GO.float()
        pairs.append(torch.stack((scales_GO, zeros_GO.bfloat16()), -1))
    return codes_OI, stacked(pairs, 1)


def _packed(codes_OI: torch.Tensor) -> torch.Tensor:
    """Return codes in PyTorch's layout, padded."""
    whole = torch.nn.functional.pad(codes_OI.int(), (0, 0, 0, -len(codes_OI) % PADDING))
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(whole, 1)  # type: ignore[no-any-return]


@cache
def block_rows() -> int:
    """Return how many outputs this processor's layout has in a block: 32 with AVX2, 64 with AVX512, 0 if unknown.

    Source: torch, ATen/native/cpu/int4mm_kernel.cpp. A probe decides, so that another layout is never misread.
    """
    codes_OI = torch.randint(0, 16, (2 * PADDING, GROUP_SIZES[-1]), generator=torch.Generator().manual_seed(0))
    packed = _packed(codes_OI)
    plain = torch.tensor([1.0, float(MIDDLE)]).bfloat16().expand(1, len(codes_OI), 2).contiguous()
    for rows in (32, 64):
        probe = CpuInt4(packed, plain, GROUP_SIZES[-1], rows, len(codes_OI), True, None)
        found_IO = torch.empty(codes_OI.t().shape)
        probe.put_in_order(probe.unpacked(slice(0, len(codes_OI)), torch.float32), found_IO)
        if torch.equal(found_IO.t(), codes_OI.float()):
            return rows
    return 0

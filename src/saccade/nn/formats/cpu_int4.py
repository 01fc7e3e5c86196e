"""Products with INT4 weights in groups on a CPU: PyTorch's kernel for few tokens, and unpacked weights for many.

`_weight_int4pack_mm_for_cpu` takes bfloat16 activations and weights (code - 8) * scale + zero; scales and zeros are
bfloat16. It reads a quarter of a bfloat16 weight's bytes, but multiplies more slowly than oneDNN. For many tokens,
some outputs at a time are unpacked into oneDNN's own layout. Shapes: N tokens, I inputs, O outputs, P outputs with
padding, G groups of columns, B blocks of R outputs, W words of an output.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch.nn import functional

from saccade.nn import cpu
from saccade.nn.cpu import OneDnnLinear, multiplies_bfloat16
from saccade.nn.formats.packed_ints import PackedInts
from saccade.nn.formats.products import Product
from saccade.nn.formats.quantised import QuantisedLinear, QuantisedWeight, stacked
from saccade.nn.libraries import Unavailable
from saccade.nn.onednn_memory import PackedMemory, possible_memory

GROUP_SIZES = (256, 128, 64, 32)
MIDDLE = 8
"""The code that the kernel takes for zero."""

PADDING = 64
"""Outputs are padded to whole blocks of the packed layout, on any processor."""

CROSSING, CROSSING_BF16 = 256, 88
"""From how many tokens on a weight is unpacked and multiplied as a plain one.

Measured with AVX2 in float32; and in bfloat16 with AVX512, which multiplies plain weights faster.
"""

UNPACKED_AT_ONCE = 1 << 20
"""Weights that are unpacked at a time: they fit into the processor's cache, or nearly."""

PACKED_AT_ONCE = 1 << 18
"""Values that are packed at a time: their copies in 32 bits fit into the caches of two cores."""


class Digits(NamedTuple):
    """How four bits become a float without a conversion: as the last bits of a power of two whose last place is 1.

    A word of 32 bits has *per_word* floats. *mask* has the last four bits of each, and *bits* its power *power*.
    """

    per_word: int
    mask: int
    bits: int
    power: int


DIGITS: Mapping[torch.dtype, Digits] = MappingProxyType(
    {
        torch.bfloat16: Digits(2, 0x000F000F, 0x43004300, 1 << 7),
        torch.float32: Digits(1, 0x0000000F, 0x4B000000, 1 << 23),
    }
)


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
        step = min(len(self.packed), outputs_of(UNPACKED_AT_ONCE, x_NI.shape[1]))
        known = known_memory(step, x_NI.shape[1], x_NI.dtype, self.block_rows)
        # Threads may share what is known, so a copy is overwritten.
        memory = None if known is None else known.copy()
        for start in range(0, len(self.packed), step):
            # The last part begins earlier, so that it is as large as the others.
            some = slice(min(start, len(self.packed) - step), start + step)
            if memory is None:
                output_NP[:, some] = functional.linear(x_NI, self.unpacked(some, x_NI.dtype))
            else:
                self.write(some, x_NI.dtype, memory.words_BWR)
                output_NP[:, some] = OneDnnLinear(memory.packed, None).apply(x_NI, None)
        return output_NP[:, : self.num_outputs]

    def unpacked(self, some: slice, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights [outputs, I] of *some* outputs, which are whole blocks."""
        num_blocks = len(self.packed[some]) // self.block_rows
        num_words = 2 * self.packed.shape[1] // DIGITS[dtype].per_word
        words_BWR = torch.empty(num_blocks, num_words, self.block_rows, dtype=torch.int32)
        self.write(some, dtype, words_BWR)
        return words_BWR.transpose(1, 2).contiguous().view(-1, num_words).view(dtype)

    def write(self, some: slice, dtype: torch.dtype, words_BWR: torch.Tensor) -> None:
        """Write the weights of *some* outputs to words int32, which have successive inputs of an output.

        The R outputs are K whole blocks of the packed layout. There, a byte has a column of two outputs, half a block
        from each other.
        """
        per_word, mask, bits, power = DIGITS[dtype]
        words_BKWR = words_BWR.unflatten(2, (-1, self.block_rows)).transpose(1, 2)
        half = self.block_rows // 2
        bytes_CBKWH = self.packed[some].view(*words_BKWR.shape[:3], per_word, half).movedim(3, 0)
        bytes_BKWH = bytes_CBKWH[0].int()
        for place, more_BKWH in enumerate(bytes_CBKWH[1:], 1):
            bytes_BKWH.add_(more_BKWH.int(), alpha=1 << 16 * place)
        torch.bitwise_and(bytes_BKWH, mask, out=words_BKWR[..., :half])
        torch.bitwise_and(bytes_BKWH.bitwise_right_shift_(4), mask, out=words_BKWR[..., half:])
        words_BWR.bitwise_or_(bits).view(dtype).sub_(power + MIDDLE)
        # A group's words of an output have one scale and one zero, which each float of a word needs.
        pairs_GBR2 = self.scales_and_zeros_GP2[:, some].to(dtype).unflatten(1, words_BWR.shape[::2])
        pairs_2BGRC = pairs_GBR2.permute(3, 1, 0, 2).unsqueeze(-1).expand(-1, -1, -1, -1, per_word)
        scales, zeros = pairs_2BGRC.flatten(3).unsqueeze(3)
        values_BGWR = words_BWR.view(dtype).unflatten(1, (scales.shape[1], -1))
        values_BGWR.mul_(scales)
        if self.has_zeros:
            values_BGWR.add_(zeros)


@cache
def known_memory(num_outputs: int, num_inputs: int, dtype: torch.dtype, block_rows: int) -> PackedMemory | None:
    """Return a weight in oneDNN's layout; None if that is not known, or has no blocks of *block_rows* outputs."""
    generator = torch.Generator().manual_seed(0)
    weight_OI = torch.randint(-128, 128, (num_outputs, num_inputs), generator=generator).to(dtype)
    layer = cpu.pack_linear(weight_OI, None)
    if layer is None:
        return None
    for memory in possible_memory(layer.packed, (num_outputs, num_inputs), dtype):
        has_blocks = memory.words_BWR.shape[2] % block_rows == 0
        if has_blocks and torch.equal(memory.rows(torch.arange(num_outputs)), weight_OI):
            return memory
    return None


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
    step = outputs_of(PACKED_AT_ONCE, codes_OI.shape[1])
    for some, into in zip(codes_OI.split(step), packed.split(step), strict=True):
        into.copy_(_packed(some))
    padded = torch.nn.functional.pad(scales_and_zeros_GO2, (0, 0, 0, padding))
    has_zeros = bool(padded[..., 1].any())
    return CpuInt4(packed, padded, size, block_rows(), len(codes_OI), has_zeros, layer.bias_O)


def outputs_of(num_values: int, num_columns: int) -> int:
    """Return how many outputs, in whole blocks, have about *num_values*."""
    return max(1, num_values // num_columns // PADDING) * PADDING


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
    step = outputs_of(PACKED_AT_ONCE, region.num_columns)
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
        if torch.equal(probe.unpacked(slice(0, len(codes_OI)), torch.float32), codes_OI.float()):
            return rows
    return 0

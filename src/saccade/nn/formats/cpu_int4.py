"""Products with INT4 weights in groups on a CPU: PyTorch's kernel for few tokens, and unpacked weights for many.

`_weight_int4pack_mm_for_cpu` takes bfloat16 activations and weights (code - 8) * scale + zero; scales and zeros are
bfloat16. It reads a quarter of a bfloat16 weight's bytes, but multiplies more slowly than oneDNN. Shapes: N tokens, I
inputs, O outputs, P outputs with padding, G groups of columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from saccade.nn.formats.packed_ints import PackedInts
from saccade.nn.formats.products import Product
from saccade.nn.formats.quantised import QuantisedLinear, QuantisedWeight
from saccade.nn.libraries import Unavailable

GROUP_SIZES = (256, 128, 64, 32)
MIDDLE = 8
"""The code that the kernel takes for zero."""

PADDING = 64
"""Outputs are padded to whole blocks of the packed layout, on any processor."""

CROSSING = 256
"""From how many tokens on a weight is unpacked and multiplied as a plain one; measured with AVX2 in float32."""

OUTPUTS_AT_ONCE = 512
"""How many outputs are packed or unpacked at a time: their copies fit into the processor's cache, or nearly."""


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
        if self.block_rows and len(x_NI) >= CROSSING:
            return self._by_unpacking(x_NI)
        output_NP = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x_NI.bfloat16(), self.packed, self.group_size, self.scales_and_zeros_GP2
        )
        return output_NP[:, : self.num_outputs].to(x_NI.dtype)  # type: ignore[no-any-return]

    def _by_unpacking(self, x_NI: torch.Tensor) -> torch.Tensor:
        output_NP = x_NI.new_empty(len(x_NI), len(self.packed))
        for start in range(0, len(self.packed), OUTPUTS_AT_ONCE):
            some = slice(start, start + OUTPUTS_AT_ONCE)
            output_NP[:, some] = x_NI @ self._unpacked(some, x_NI.dtype)
        return output_NP[:, : self.num_outputs]

    def _unpacked(self, some: slice, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights [I, outputs] of *some* outputs, which must be whole blocks."""
        half = self.block_rows // 2
        # A byte has one column of two outputs, half a block from each other.
        bytes_BGCH = self.packed[some].view(-1, len(self.scales_and_zeros_GP2), self.group_size, half)
        of_blocks = self.scales_and_zeros_GP2[:, some].to(dtype).unflatten(1, (-1, 2, half)).transpose(0, 1)
        output_GCB2H = torch.empty(*bytes_BGCH.shape[1:3], len(bytes_BGCH), 2, half, dtype=dtype)
        for place, codes_BGCH in enumerate((bytes_BGCH & 15, bytes_BGCH >> 4)):
            scales_BG1H, zeros_BG1H = of_blocks[:, :, place].unsqueeze(2).unbind(-1)
            values = output_GCB2H.permute(2, 0, 1, 3, 4)[:, :, :, place]
            torch.mul(codes_BGCH.view(torch.int8).sub_(MIDDLE), scales_BG1H, out=values)
            if self.has_zeros:
                values += zeros_BG1H
        return output_GCB2H.flatten(0, 1).flatten(1)


def pack_linear(layer: QuantisedLinear) -> CpuInt4:
    """Return the product for *layer*, whose parts are all PackedInts of four bits. Raises Unavailable."""
    weights = [part for part in layer.parts if isinstance(part, QuantisedWeight)]
    size = _group_size(weights)
    numbers = [_numbers(weight, size) for weight in weights]
    codes_OI = torch.cat([codes for codes, _ in numbers])
    scales_and_zeros_GO2 = torch.cat([pairs for _, pairs in numbers], 1)
    padding = -len(codes_OI) % PADDING
    packed = torch.cat([_packed(codes) for codes in codes_OI.split(OUTPUTS_AT_ONCE)])
    padded = torch.nn.functional.pad(scales_and_zeros_GO2, (0, 0, 0, padding))
    has_zeros = bool(padded[..., 1].any())
    return CpuInt4(packed, padded, size, block_rows(), len(codes_OI), has_zeros, layer.bias_O)


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
    codes, pairs = [], []
    first = torch.arange(region.column, region.column + region.num_columns, size)
    for start in range(0, region.num_rows, OUTPUTS_AT_ONCE):
        rows = weight.rows(start, min(OUTPUTS_AT_ONCE, region.num_rows - start))
        codes_OI, scales_OG, zeros_OG = form.codes(rows.fields, rows.region)
        # Longer groups are repeated.
        groups = first // form.group_size - region.column // form.group_size
        scales_GO = scales_OG[:, groups].t().bfloat16()
        zeros_GO = (MIDDLE - zeros_OG[:, groups].t()) * scales_GO.float()
        codes.append(codes_OI.to(torch.uint8))
        pairs.append(torch.stack((scales_GO, zeros_GO.bfloat16()), -1))
    return torch.cat(codes), torch.cat(pairs, 1)


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
        if torch.equal(probe._unpacked(slice(0, len(codes_OI)), torch.float32).t(), codes_OI.float()):
            return rows
    return 0

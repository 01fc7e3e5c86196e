"""Whole numbers of 4 or 8 bits, packed in words of 32 bits. Groups of columns have a scale, and perhaps a zero point.

Sources: compressed-tensors, compressors/pack_quantized (unpack_from_int32) and quantization/lifecycle/forward.py;
AutoAWQ, awq/utils/packing_utils.py; AutoGPTQ, nn_modules/qlinear; GPTQModel, for checkpoint_format "gptq_v2".
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import ClassVar

import torch

from saccade.nn.formats.quantised import (
    WHOLE_ROW,
    DerivedValues,
    QuantisedWeight,
    Region,
    WeightField,
    looked_up,
    scaled,
)

WORD = 32
FLOATS = ("BF16", "F16", "F32")
LARGEST_INT4 = 7.5
"""What rounding makes of the largest of a group: half of the range from -8 to 7, as in compressed-tensors."""

ROUNDED_AT_ONCE = 1 << 18
"""Values that are rounded at a time: their copies in float32 fit into the caches of two cores."""

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of each of eight successive outputs."""


SHAPE = MappingProxyType(
    {"weight_shape": DerivedValues("the shape of the weight", lambda rows, columns: torch.tensor([rows, columns]))}
)


@dataclass(frozen=True)
class PackedInts:
    """Unsigned numbers of *bits* bits. *group_size* columns share a scale; with WHOLE_ROW, all of them do.

    *values*, *scales* and *zeros* are the suffixes of the fields' names; without *zeros*, the zero point is the middle.
    A word of zero points has several rows of one group. A word of values has several columns of one row, or with
    *packs_rows* several rows of one column. *places* are the rows' places in a word; None keeps their order.
    *zeros_offset* is added to a stored zero point. With *is_transposed*, the checkpoint stores [I, O].
    """

    name: str
    bits: int
    group_size: int
    values: str
    scales: str
    zeros: str | None = None
    derived: Mapping[str, DerivedValues] = field(default_factory=dict, compare=False)
    packs_rows: bool = False
    places: tuple[int, ...] | None = None
    zeros_offset: int = 0
    is_transposed: bool = False
    joins_experts = False
    optional = ()
    unused = ()
    aliases: ClassVar[Mapping[str, str]] = MappingProxyType({})

    @property
    def kind(self) -> str:
        """The kind of kernel that takes the format; "int8" is that of weights with rounded activations."""
        return "int4" if self.bits == 4 else "w8a16"

    @property
    def fields(self) -> Mapping[str, WeightField]:
        """The format's fields: words of values, scales, and words of zero points, if it has any."""
        per_word, turned = WORD // self.bits, self.is_transposed
        fields = {
            self.values: WeightField(("I32",), (per_word, 1) if self.packs_rows else (1, per_word), turned),
            self.scales: WeightField(FLOATS, (1, self.group_size), turned),
        }
        if self.zeros is not None:
            fields[self.zeros] = WeightField(("I32",), (per_word, self.group_size), turned)
        return fields

    def transposed(self) -> None:
        """Return None: values are packed along one side only."""

    def dequantise(self, fields: Mapping[str, torch.Tensor], region: Region) -> torch.Tensor:
        """Return (value - zero point) * scale."""
        values = self._numbers(fields[self.values], region, 0 if self.zeros else self._middle)
        zeros = self._zeros(fields, region) if self.zeros else None
        return scaled(values, fields[self.scales].float(), (1, self.group_size), region, zeros)

    def codes(
        self, fields: Mapping[str, torch.Tensor], region: Region
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return *region*'s unsigned numbers uint8 [O, I], and its scales and zero points [O, groups], float32."""
        scales = fields[self.scales].float()
        zeros = self._zeros(fields, region) if self.zeros else torch.full_like(scales, self._middle)
        words = fields[self.values]
        if self.packs_rows:
            return self._unpacked_rows(words, region).to(torch.uint8), scales, zeros
        codes = _split_nibbles(words.view(torch.uint8)) if self.bits == 4 else words.view(torch.uint8)
        return codes.narrow(-1, region.column % (WORD // self.bits), region.num_columns), scales, zeros

    @property
    def _middle(self) -> int:
        return 1 << self.bits - 1

    def _zeros(self, fields: Mapping[str, torch.Tensor], region: Region) -> torch.Tensor:
        """Return the zero points of the groups that *region* touches."""
        return self._unpacked_rows(fields[self.zeros or ""], region) + self.zeros_offset

    def _numbers(self, words: torch.Tensor, region: Region, less: int) -> torch.Tensor:
        """Return the numbers [O, I] of *region*, minus *less*, in float32."""
        if self.packs_rows:
            return self._unpacked_rows(words, region) - less
        # Torch and safetensors store the lowest byte of a word first.
        codes = words.view(torch.uint8)
        values = looked_up(codes, _nibbles(less, words.device)) if self.bits == 4 else codes.float() - less
        return values.narrow(-1, region.column % (WORD // self.bits), region.num_columns)

    def _unpacked_rows(self, words: torch.Tensor, region: Region) -> torch.Tensor:
        """Return the numbers of *region*'s rows in float32, from words that have several rows each."""
        per_word = WORD // self.bits
        shifts = torch.tensor(self.places or range(per_word), dtype=torch.int32, device=words.device) * self.bits
        numbers = (words.unsqueeze(1) >> shifts.view(1, -1, 1)) & ((1 << self.bits) - 1)
        return numbers.flatten(0, 1).narrow(0, region.row % per_word, region.num_rows).float()


@lru_cache(maxsize=8)
def _nibbles(middle: int, device: torch.device) -> torch.Tensor:
    """Return the two values of every byte, less *middle*, [256, 2]."""
    codes = torch.arange(256, device=device)
    return torch.stack((codes % 16, codes // 16), -1).float() - middle


def _groups(size: int, *, is_needed: bool) -> DerivedValues:
    """Return the group of each column, which releases store. Weights with columns in another order are not read."""
    words = "column // group_size: groups in the order of activations are not served"
    return DerivedValues(words, lambda _, columns: torch.arange(columns) // size, is_needed)


def compressed(
    bits: int = 4, group_size: int = WHOLE_ROW, *, symmetric: bool = True, by_activations: bool = False
) -> PackedInts:
    """Return compressed-tensors' format "pack-quantized".

    If the configuration says that groups are *by_activations*, the checkpoint must show that they are not.
    """
    zeros = None if symmetric else "weight_zero_point"
    kind = "" if symmetric else ", asymmetric"
    name = f"compressed-tensors pack-quantized, {bits} bits{kind}"
    groups = {"weight_g_idx": _groups(group_size, is_needed=True)} if by_activations else {}
    return PackedInts(name, bits, group_size, "weight_packed", "weight_scale", zeros, {**SHAPE, **groups})


def rounded_groups(weight_OI: torch.Tensor, group_size: int) -> QuantisedWeight:
    """Return *weight_OI* rounded to symmetric INT4, in groups of *group_size* columns. The size must divide I."""
    rows, columns = weight_OI.shape
    words = torch.empty(rows, columns // (WORD // 4), dtype=torch.int32, device=weight_OI.device)
    scales = torch.empty(rows, columns // group_size, dtype=torch.bfloat16, device=weight_OI.device)
    step = max(1, ROUNDED_AT_ONCE // columns)
    in_float = torch.empty(min(step, rows), columns // group_size, group_size, device=weight_OI.device)
    for some, into, of_groups in zip(weight_OI.split(step), words.split(step), scales.split(step), strict=True):
        groups = in_float[: len(some)].copy_(some.unflatten(1, (-1, group_size)))
        largest = torch.maximum(groups.amax(-1), -groups.amin(-1))
        of_groups.copy_(largest.clamp_min_(torch.finfo(torch.float32).tiny * WORD).div_(LARGEST_INT4))
        groups.div_(of_groups.float().unsqueeze(-1)).round_().clamp_(-8, 7).add_(8)
        into.copy_(_joined_nibbles(groups.to(torch.uint8).flatten(1)).view(torch.int32))
    fields = {"weight_packed": words, "weight_scale": scales}
    return QuantisedWeight(compressed(4, group_size), fields, Region(0, rows, 0, columns))


def _joined_nibbles(codes_OI: torch.Tensor) -> torch.Tensor:
    """Return two successive codes uint8 in each byte [O, I / 2], the first in its lower half."""
    pairs = codes_OI.view(torch.int16)
    return (pairs >> 4).bitwise_or_(pairs).to(torch.uint8)


def _split_nibbles(bytes_OB: torch.Tensor) -> torch.Tensor:
    """Return the two codes uint8 of each byte, side by side [O, 2 * B], the lower half first."""
    pairs = bytes_OB.to(torch.int16)
    return pairs.bitwise_or_(pairs << 4).bitwise_and_(0x0F0F).view(torch.uint8)


def awq(group_size: int = WHOLE_ROW) -> PackedInts:
    """Return AutoAWQ's format "gemm"."""
    return PackedInts(
        "AWQ, 4 bits", 4, group_size, "qweight", "scales", "qzeros",
        packs_rows=True, places=AWQ_PLACES, is_transposed=True,
    )  # fmt: skip


def gptq(
    bits: int = 4, group_size: int = WHOLE_ROW, *, zeros_offset: int = 1, by_activations: bool = False
) -> PackedInts:
    """Return AutoGPTQ's format, whose zero points are stored minus one; those of "gptq_v2" are not.

    If the configuration says that groups are *by_activations*, the checkpoint must show that they are not.
    """
    return PackedInts(
        f"GPTQ, {bits} bits", bits, group_size, "qweight", "scales", "qzeros",
        {"g_idx": _groups(group_size, is_needed=by_activations)}, zeros_offset=zeros_offset, is_transposed=True,
    )  # fmt: skip

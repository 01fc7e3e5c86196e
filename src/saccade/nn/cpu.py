"""Operations (saccade.nn.ops) in bfloat16 on a CPU: linear layers by oneDNN, rotations of a few tokens at a time."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from saccade.nn.onednn_memory import possible_memory
from saccade.nn.ops import GELU, GELU_TANH, SILU, Activation, PackedLinear

ATTRIBUTES: Mapping[Activation | None, tuple[str, str]] = MappingProxyType(
    {None: ("none", ""), GELU: ("gelu", "none"), GELU_TANH: ("gelu", "tanh"), SILU: ("swish", "")}
)
"""oneDNN's name and algorithm of each activation; others are applied to its output."""

ROWS = 128
"""How many tokens are rotated at a time: their float32 copies fit into the processor's cache."""


@dataclass(frozen=True)
class OneDnnLinear(PackedLinear):
    """PackedLinear with the weight in oneDNN's blocked layout.

    With a plain weight, oneDNN would make that layout in every call, which costs more than multiplying a few rows.
    oneDNN applies the activation, or adds the residual, before it rounds.
    """

    packed: torch.Tensor
    bias_O: torch.Tensor | None

    def apply(self, x_NI: torch.Tensor, activation: Activation | None) -> torch.Tensor:
        """Return activation(x W^T + b) [N, O]."""
        attribute, algorithm = ATTRIBUTES.get(activation, ATTRIBUTES[None])
        output_NO: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x_NI, self.packed, self.bias_O, attribute, [], algorithm
        )
        return output_NO if activation is None or activation in ATTRIBUTES else activation(output_NO)

    def add_to(self, residual_NO: torch.Tensor, x_NI: torch.Tensor) -> torch.Tensor:
        """Return residual + x W^T + b [N, O]."""
        return torch.ops.mkldnn._linear_pointwise.binary(x_NI, residual_NO, self.packed, self.bias_O, "add")  # type: ignore[no-any-return]

    def possible_rows(self, shape: tuple[int, int]) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """See PackedLinear.possible_rows."""
        return (memory.rows for memory in possible_memory(self.packed, shape, torch.bfloat16))


def pack_linear(weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> OneDnnLinear | None:
    """Return the packed layer, or None if oneDNN does not compute with the weight's dtype on this processor."""
    is_supported = weight_OI.dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if not (torch.backends.mkldnn.is_available() and is_supported):
        return None
    return OneDnnLinear(torch.ops.mkldnn._reorder_linear_weight(weight_OI.data, None), bias_O)


def multiplies_bfloat16() -> bool:
    """Return whether this processor has instructions that multiply bfloat16: AVX512_BF16 or AMX."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def rotary_pairs(x_NHD: torch.Tensor, cos_sin_N1C: torch.Tensor) -> torch.Tensor | None:
    """Rotate ROWS tokens at a time; return None if there are no more tokens than that."""
    if len(x_NHD) <= ROWS:
        return None
    output_NHD = torch.empty_like(x_NHD, memory_format=torch.contiguous_format)
    for x, cos_sin, output in zip(x_NHD.split(ROWS), cos_sin_N1C.split(ROWS), output_NHD.split(ROWS), strict=True):
        values = x.float()
        torch.view_as_complex(values.unflatten(-1, (-1, 2))).mul_(cos_sin)
        output.copy_(values)
    return output_NHD

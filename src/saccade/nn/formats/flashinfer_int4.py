"""Mixtures of experts with symmetric INT4 weights in groups of 32 on Blackwell by FlashInfer.

Activations stay bfloat16. Rows, blocks of columns and scales are put into the kernel's own order once. Source of the
arguments: flashinfer/fused_moe/core.py and prepare.py (prepare_trtllm_mxint4_weights), release 0.7.2. It has never run
on a GPU; tests/real checks its calls against the releases' own signatures. Shapes: N tokens, E experts, K experts of a
token.
"""

from dataclasses import dataclass

import torch
from flashinfer import block_scale_interleave, shuffle_matrix_a
from flashinfer.fused_moe import (
    convert_to_block_layout,
    reorder_rows_for_gated_act_gemm,
    trtllm_mxint4_block_scale_routed_moe,
)

from saccade.nn.formats.packed_ints import PackedInts
from saccade.nn.formats.products import aligned, capability, field_of
from saccade.nn.formats.quantised import Part, QuantisedExperts
from saccade.nn.libraries import Unavailable
from saccade.nn.ops import ExpertShare, PackedExperts

BLACKWELL = 10
GROUP, SIDES, TILE = 32, 256, 128
SIGNS = 0x88
"""The bits that turn two codes, stored as value + 8, into signed numbers of four bits."""


@dataclass(frozen=True)
class Int4Experts(PackedExperts):
    """Experts in INT4: *up_gate* has the ups first; *width* is I. All tensors are in the kernel's order."""

    up_gate: torch.Tensor
    up_gate_scales: torch.Tensor
    down: torch.Tensor
    down_scales: torch.Tensor
    width: int
    share: ExpertShare

    def apply(self, x_NE: torch.Tensor, expert_ids_NK: torch.Tensor, weights_NK: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of this rank's experts, [N, H]. Weights are rounded to bfloat16."""
        ids, weights = expert_ids_NK.int(), weights_NK.bfloat16().view(torch.int16).int() & 0xFFFF
        (output,) = trtllm_mxint4_block_scale_routed_moe(
            ids << 16 | weights,
            x_NE,
            self.up_gate,
            self.up_gate_scales,
            None,
            None,
            None,
            self.down,
            self.down_scales,
            self.share.num_experts,
            ids.shape[1],
            None,
            None,
            self.width,
            self.share.rank * len(self.down),
            len(self.down),
            None,
        )
        return output  # type: ignore[no-any-return]


def pack_experts(gate_up: QuantisedExperts, down: QuantisedExperts, share: ExpertShare) -> Int4Experts:
    """Return the mixture of experts. Raises Unavailable."""
    up_gate, own_down = _fields_of(gate_up.parts[::-1]), _fields_of(down.parts)
    width = own_down[0].shape[2] * 2
    return Int4Experts(*_in_order(*up_gate, is_gated=True), *_in_order(*own_down, is_gated=False), width, share)


def _fields_of(parts: tuple[Part, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return signed values uint8 [E, O, I / 2], two per byte, and bfloat16 scales [E, O, I / 32].

    Raises Unavailable.
    """
    weights = aligned(parts, SIDES, SIDES)
    form = weights[0].format
    if not isinstance(form, PackedInts):
        raise TypeError(f"{form.name} has no packed integers.")
    if capability(weights[0].fields[form.values])[0] != BLACKWELL:
        raise Unavailable(
            "INT4 experts have a kernel on Blackwell alone (compute capability 10.x): that for Hopper takes groups of "
            "128 and rounds activations to FP8"
        )
    if (form.group_size, form.zeros, form.packs_rows) != (GROUP, None, False):
        raise Unavailable(f"the kernel for INT4 experts takes groups of {GROUP} without zero points")
    values, scales = field_of(weights, form.values), field_of(weights, form.scales)
    if values.shape[1] % SIDES:
        raise Unavailable(f"its sides are no multiples of {SIDES}")
    return values.view(torch.uint8) ^ SIGNS, scales.bfloat16()


def _in_order(values: torch.Tensor, scales: torch.Tensor, *, is_gated: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values and scales of all experts in the kernel's order."""

    def rows(matrix: torch.Tensor) -> torch.Tensor:
        return shuffle_matrix_a(reorder_rows_for_gated_act_gemm(matrix) if is_gated else matrix, TILE)  # type: ignore[no-any-return]

    ordered = [convert_to_block_layout(rows(own), TILE) for own in values]
    of_groups = [block_scale_interleave(rows(own)).view(own.shape) for own in scales]
    return torch.stack(ordered), torch.stack(of_groups)

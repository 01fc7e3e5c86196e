"""Experts (saccade.nn.ops.experts) in bfloat16 on a GPU: two grouped products for all experts; the host does not wait.

torch's grouped product takes rows sorted by group, and the end of each group, both on the device. Triton makes these,
and adds up the results. Rows after the last group are not written, and may hold anything. The product needs rows whose
size is a multiple of 16 bytes. Shapes: N tokens, E width, K experts of a token, M = N * K.
"""

import torch
import triton
from torch.nn import functional

from saccade.nn import gpu
from saccade.nn.backends.triton_experts import places_kernel, rows_kernel, sum_kernel
from saccade.nn.ops import SILU, Activation, ExpertMatrices, gated_activation

ROW_BYTES = 16
CHOICES, COLUMNS = 1024, 1024
"""Choices that a program looks at together, and columns of a program."""


def experts(
    x_NE: torch.Tensor,
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    expert_ids_NK: torch.Tensor,
    weights_NK: torch.Tensor,
    activation: Activation = SILU,
) -> torch.Tensor | None:
    """Compute ops.experts. Return None for quantised matrices, and for rows that the grouped product does not take."""
    if not isinstance(gate_up, torch.Tensor) or not isinstance(down, torch.Tensor):
        return None
    if x_NE.stride(1) != 1 or any(matrices.shape[-1] * matrices.itemsize % ROW_BYTES for matrices in (gate_up, down)):
        return None
    places_NK, ends = places_of(expert_ids_NK, len(gate_up))
    rows_ME = rows_at(places_NK, x_NE)
    gate_up_ME = functional.grouped_mm(rows_ME, gate_up.transpose(1, 2), offs=ends)
    gated = gpu.gated_activation(gate_up_ME, activation)
    if gated is None:
        gated = gated_activation(gate_up_ME, activation)
    results_ME = functional.grouped_mm(gated, down.transpose(1, 2), offs=ends)
    return sum_at(places_NK, results_ME, weights_NK)


def places_of(expert_ids_NK: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row int32 [N, K] of each choice, sorted by expert, and the end int32 of each expert's rows.

    A choice of another rank's expert has row -1.
    """
    places_NK = torch.empty(expert_ids_NK.shape, dtype=torch.int32, device=expert_ids_NK.device)
    ends = torch.empty(num_experts, dtype=torch.int32, device=expert_ids_NK.device)
    places_kernel[(num_experts,)](expert_ids_NK.contiguous(), places_NK, ends, places_NK.numel(), TILE=CHOICES)
    return places_NK, ends


def rows_at(places_NK: torch.Tensor, x_NE: torch.Tensor) -> torch.Tensor:
    """Return [M, E]: each token's row of *x_NE*, at the places of the token's choices."""
    width = x_NE.shape[1]
    rows_ME = x_NE.new_empty(places_NK.numel(), width)
    grid = len(rows_ME), triton.cdiv(width, COLUMNS)
    sizes = {"CHOICES": places_NK.shape[1], "COLUMNS": COLUMNS}
    rows_kernel[grid](x_NE, places_NK, rows_ME, width, x_NE.stride(0), **sizes)
    return rows_ME


def sum_at(places_NK: torch.Tensor, results_ME: torch.Tensor, weights_NK: torch.Tensor) -> torch.Tensor:
    """Return [N, E]: the sum of each token's weighted results, computed in float32 and rounded once."""
    num_tokens, num_choices = places_NK.shape
    width = results_ME.shape[1]
    output_NE = results_ME.new_empty(num_tokens, width)
    grid = num_tokens, triton.cdiv(width, COLUMNS)
    sizes = {"CHOICES": num_choices, "COLUMNS": COLUMNS}
    sum_kernel[grid](results_ME, places_NK, weights_NK.contiguous(), output_NE, width, **sizes)
    return output_NE

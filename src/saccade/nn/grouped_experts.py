"""Experts (saccade.nn.ops.experts) in bfloat16 on a GPU: two grouped products for all experts; the host does not wait.

torch's grouped product takes rows that are sorted by group and the end of each group, on the device. Rows after the
last group are not written, and hold anything. It needs rows of multiples of 16 bytes. Shapes: N tokens, E width, K
experts of a token, M = N * K.
"""

import torch
from torch.nn import functional

from saccade.nn.ops import SILU, Activation, ExpertMatrices, gated_activation

ROW_BYTES = 16


def experts(
    x_NE: torch.Tensor,
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    expert_ids_NK: torch.Tensor,
    weights_NK: torch.Tensor,
    activation: Activation = SILU,
) -> torch.Tensor | None:
    """Compute ops.experts. Return None for quantised matrices, and for rows that the grouped product refuses."""
    if not isinstance(gate_up, torch.Tensor) or not isinstance(down, torch.Tensor):
        return None
    if any(matrices.shape[-1] * matrices.itemsize % ROW_BYTES for matrices in (gate_up, down)):
        return None
    num_experts, num_choices = len(gate_up), expert_ids_NK.shape[1]
    ids_M = expert_ids_NK.flatten()
    is_own_M = (ids_M >= 0) & (ids_M < num_experts)
    # Choices of other ranks' experts come last, after all groups.
    sorted_M, order_M = ids_M.masked_fill(~is_own_M, num_experts).sort(stable=True)
    groups = torch.arange(num_experts, device=ids_M.device)
    ends = torch.searchsorted(sorted_M, groups, right=True).int()
    rows_ME = x_NE.index_select(0, order_M // num_choices)
    gated = gated_activation(functional.grouped_mm(rows_ME, gate_up.transpose(1, 2), offs=ends), activation)
    sorted_results_ME = functional.grouped_mm(gated, down.transpose(1, 2), offs=ends)
    results_ME = torch.empty_like(sorted_results_ME).index_copy_(0, order_M, sorted_results_ME)
    results_ME = results_ME.masked_fill_(~is_own_M.unsqueeze(1), 0)
    shares_N1K = weights_NK.masked_fill(~is_own_M.view_as(weights_NK), 0).unsqueeze(1)
    sum_N1E = shares_N1K.float() @ results_ME.view(len(x_NE), num_choices, -1).float()
    return sum_N1E.squeeze(1).to(x_NE.dtype)

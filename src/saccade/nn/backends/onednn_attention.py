"""Attention on a CPU by oneDNN's products in float32, some queries at a time.

PyTorch's own attention multiplies by MKL, which takes twice as long as oneDNN on processors with AVX512 that Intel did
not make (docs/decisions/008-kernels-on-cpu.md). Scores, weights and sums are float32, so no answer is less exact than
PyTorch's. Shapes: N tokens, L tokens of the context, Q query heads, K key/value heads, G = Q / K query heads per
key/value head, D head size, W width of a value.
"""

import torch

from saccade.nn.backends import torch_sdpa
from saccade.nn.backends.workload import Workload, not_faster_by_onednn
from saccade.nn.context import Heads, PackedLayout, Scoring

BLOCK_ROWS = 512
"""Rows of a product: with fewer, oneDNN takes longer; the scores of more leave the processor's cache."""

SHORT_SEQUENCE = 384
"""Images and prompts of fewer tokens are left to PyTorch, which attends for all heads and windows in one call."""


class VisionAttentionBackend(torch_sdpa.VisionAttentionBackend):
    """Implements nn.context.VisionAttentionBackend: long sequences with oneDNN, the rest with PyTorch."""

    name = "onednn"

    @staticmethod
    def unavailable(workload: Workload) -> str | None:
        """Return why this backend would not compute *workload* faster; None if it does."""
        return not_faster_by_onednn(workload)

    def packed(self, heads_NQD: Heads, layout: PackedLayout, scale: float | None = None) -> torch.Tensor:
        """Attend within each sequence: its length alone decides how, so that no image changes another's bits."""
        if layout.max_seqlen < SHORT_SEQUENCE:
            return super().packed(heads_NQD, layout, scale)
        sequences = zip(*(tensor.split_with_sizes(layout.sequence_lengths) for tensor in heads_NQD), strict=True)
        return torch.cat(
            [
                torch_sdpa.attend_within_equal(sequence, 1, scale)
                if len(sequence[0]) < SHORT_SEQUENCE
                else self.attend_long(sequence, scale)
                for sequence in sequences
            ]
        )

    def attend_long(self, heads_NQD: Heads, scale: float | None) -> torch.Tensor:
        """Return the attention [N, Q * D] within one sequence."""
        return attend_in_blocks(*heads_NQD, scale)


class AttentionBackend(torch_sdpa.AttentionBackend):
    """Implements nn.context.AttentionBackend: prompts with oneDNN, the rest with PyTorch."""

    name = "onednn"

    @staticmethod
    def unavailable(workload: Workload) -> str | None:
        """Return why this backend would not compute *workload* faster; None if it does."""
        return not_faster_by_onednn(workload)

    def attend_prompt(
        self, q_NQD: torch.Tensor, k_LKD: torch.Tensor, v_LKW: torch.Tensor, mask: torch.Tensor | None, scoring: Scoring
    ) -> torch.Tensor:
        """Implements AttendPrompt."""
        if scoring.soft_cap is not None or len(q_NQD) < SHORT_SEQUENCE:
            return super().attend_prompt(q_NQD, k_LKD, v_LKW, mask, scoring)
        return attend_in_blocks(q_NQD, k_LKD, v_LKW, scoring.scale, mask, causal=mask is None)


def attend_in_blocks(
    q_NQD: torch.Tensor,
    k_LKD: torch.Tensor,
    v_LKW: torch.Tensor,
    scale: float | None = None,
    mask_NL: torch.Tensor | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Return the attention [N, Q * W] of queries over keys and values, in the dtype of the queries.

    Each query sees the tokens that *mask_NL* (bool) names, by default all. With *causal*, the queries are the last N of
    the L tokens, and see no later ones. Scores are multiplied by *scale*, or by D ** -0.5 if it is None.
    """
    num_queries, num_heads, head_dim = q_NQD.shape
    length, num_kv_heads, value_width = v_LKW.shape
    group = num_heads // num_kv_heads
    q_KGND = (
        _float32_by_head(q_NQD).mul_(head_dim**-0.5 if scale is None else scale).unflatten(0, (num_kv_heads, group))
    )
    k_KLD, v_KLW = _float32_by_head(k_LKD), _float32_by_head(v_LKW)
    output_NKGW = q_NQD.new_empty(num_queries, num_kv_heads, group, value_width)
    for start in range(0, num_queries, step := max(BLOCK_ROWS // group, 1)):
        block = slice(start, min(start + step, num_queries))
        num_seen = length - num_queries + block.stop if causal else length
        hidden = _hidden(mask_NL, block, causal, q_KGND.device)
        for head in range(num_kv_heads):
            q_RD = q_KGND[head, :, block].reshape(-1, head_dim)
            scores_RL = _product(q_RD, k_KLD[head, :num_seen])
            if hidden is not None:
                scores_GNL = scores_RL.unflatten(0, (group, -1))
                scores_GNL[..., num_seen - hidden.shape[1] :].masked_fill_(hidden, float("-inf"))
            # In place: twice as many scores leave the processor's cache.
            weights_RL = torch.softmax(scores_RL, -1, out=scores_RL)
            attended_RW = _product(weights_RL, v_KLW[head, :num_seen].t())
            output_NKGW[block, head] = attended_RW.unflatten(0, (group, -1)).transpose(0, 1)
    return output_NKGW.flatten(1)


def _float32_by_head(tokens_NHD: torch.Tensor) -> torch.Tensor:
    """Return a new tensor [H, N, D] without gaps: with gaps, oneDNN multiplies by a slow reference."""
    tokens_HND = tokens_NHD.transpose(0, 1)
    return torch.empty(tokens_HND.shape, dtype=torch.float32, device=tokens_NHD.device).copy_(tokens_HND)


def _hidden(mask_NL: torch.Tensor | None, block: slice, causal: bool, device: torch.device) -> torch.Tensor | None:
    """Return which of the last tokens [n, up to L] the queries of *block* do not see; None if they see all."""
    if mask_NL is not None:
        return ~mask_NL[block]
    if not causal:
        return None
    size = block.stop - block.start
    return torch.ones(size, size, dtype=torch.bool, device=device).triu_(1)


def _product(x_NI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """Return x W^T [N, O] in float32 by oneDNN."""
    output_NO: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x_NI, weight_OI, None, "none", [], "")
    return output_NO

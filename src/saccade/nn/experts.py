"""Mixtures of experts: each token uses a few of many gated MLPs (Shazeer et al. 2017, arXiv:1701.06538).

A family's router chooses the experts and their weights. Shapes: N tokens, H hidden size, I intermediate size, E experts
of this rank, K experts of a token.
"""

import torch
from torch import nn

from saccade.nn.formats.quantised import Part, QuantisedExperts
from saccade.nn.layers import Layer
from saccade.nn.ops import ExpertMatrices
from saccade.nn.parallel import ALONE, Ranks, Sharding


class Experts(Layer):
    """The experts of one layer. *gate_up_proj* is [E, 2I, H], *down_proj* [E, H, I].

    Each of *ranks* holds whole experts if they can share them equally, else an equal part of every expert's width I.
    """

    def __init__(self, num_experts: int, hidden: int, intermediate: int, ranks: Ranks = ALONE) -> None:
        super().__init__()
        are_whole = num_experts % ranks.size == 0
        width = intermediate if are_whole else ranks.divide(intermediate, "channels in each expert")
        share = num_experts // ranks.size if are_whole else num_experts
        self.first = ranks.rank * share if are_whole else 0
        self.ranks = ranks
        self.gate_up_proj = nn.Parameter(torch.empty(share, 2 * width, hidden), requires_grad=False)
        self.down_proj = nn.Parameter(torch.empty(share, hidden, width), requires_grad=False)
        whole = Sharding((num_experts,), 0, (ranks.size if are_whole else 1,))
        self.experts = {"gate_up_proj": whole, "down_proj": whole}
        cuts = 1 if are_whole else ranks.size
        self.shardings = {
            "gate_up_proj": Sharding((intermediate, intermediate), 0, (cuts, cuts)),
            "down_proj": Sharding((intermediate,), 1, (cuts,)),
        }
        self.quantised: dict[str, QuantisedExperts] = {}

    def hold(self, name: str, parts: tuple[Part, ...]) -> None:
        """Multiply by *parts*, one below the other, instead of the empty parameter *name*."""
        num_experts = self.experts[name].lengths()[0]
        self.quantised[name] = QuantisedExperts(parts, num_experts, getattr(self, name).dtype)

    def forward(self, x_NH: torch.Tensor, expert_ids_NK: torch.Tensor, weights_NK: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum [N, H] of the chosen experts' results, over all ranks.

        *expert_ids_NK* int64 count the experts of all ranks; the ids of a token differ. *weights_NK* is float32.
        """
        own_ids_NK = expert_ids_NK - self.first
        gate_up: ExpertMatrices = self.quantised.get("gate_up_proj", self.gate_up_proj)
        down: ExpertMatrices = self.quantised.get("down_proj", self.down_proj)
        return self.ranks.all_reduce(self.ops.experts(x_NH, gate_up, down, own_ids_NK, weights_NK))


def softmax_top_k(logits_NE: torch.Tensor, top_k: int, *, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids int64 [N, K] and weights float32 [N, K] of the *top_k* experts, by the softmax of *logits_NE*.

    With *renormalise* the weights of a token sum to 1. Source: transformers, modeling_qwen3_moe.py, Qwen3MoeTopKRouter.
    """
    weights_NK, expert_ids_NK = logits_NE.float().softmax(-1).topk(top_k, -1)
    return expert_ids_NK, weights_NK / weights_NK.sum(-1, keepdim=True) if renormalise else weights_NK

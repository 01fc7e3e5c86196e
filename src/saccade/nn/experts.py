"""Mixtures of experts: each token uses a few of many gated MLPs (Shazeer et al. 2017, arXiv:1701.06538).

Each family's router chooses the experts and their weights. Shapes: N tokens, H hidden size, I intermediate size, E
experts of this rank, K experts of a token.
"""

import torch
from torch import nn

from saccade.nn.formats.fp8 import rounded
from saccade.nn.formats.quantised import PLAIN_KIND, Part, QuantisedExperts, growth, kinds_of, num_rows
from saccade.nn.layers import Layer
from saccade.nn.libraries import Unavailable, attempt, kernel
from saccade.nn.ops import SILU, Activation, ExpertMatrices, ExpertShare, PackedExperts
from saccade.nn.parallel import ALONE, Ranks, Sharding


class Experts(Layer):
    """The experts of one layer. *gate_up_proj* is [E, 2I, H], *down_proj* [E, H, I].

    Each of *ranks* holds whole experts if they can be shared equally, or else an equal part of every expert's width I.
    """

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        intermediate: int,
        ranks: Ranks = ALONE,
        activation: Activation = SILU,
    ) -> None:
        super().__init__()
        self.activation = activation
        are_whole = num_experts % ranks.size == 0
        width = intermediate if are_whole else ranks.divide(intermediate, "channels in each expert")
        share = num_experts // ranks.size if are_whole else num_experts
        self.first = ranks.rank * share if are_whole else 0
        self.share = ExpertShare(num_experts, ranks.rank, ranks.size) if are_whole else ExpertShare(num_experts, 0, 1)
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
        self.packed: PackedExperts | None = None

    def hold(self, name: str, parts: tuple[Part, ...]) -> None:
        """Multiply by *parts*, one below the other, instead of the empty parameter *name*."""
        num_experts = self.experts[name].lengths()[0]
        self.quantised[name] = QuantisedExperts(parts, num_experts, getattr(self, name).dtype)

    def round_to_fp8(self) -> None:
        """Replace the loaded matrices with FP8 blocks."""
        for name, sharding in self.shardings.items():
            parts = getattr(self, name).data.split_with_sizes(sharding.lengths(), 1 + sharding.dim)
            self.hold(name, tuple(rounded(part) for part in parts))
            setattr(
                self, name, nn.Parameter(getattr(self, name).new_empty(0, *parts[0].shape[1:]), requires_grad=False)
            )

    @property
    def growth_as_plain(self) -> int:
        """See Layer.growth_as_plain."""
        return sum(growth(matrices.parts, matrices.dtype) for matrices in self.quantised.values())

    def make_plain(self) -> None:
        """Replace quantised matrices with their values."""
        for name, matrices in self.quantised.items():
            empty = getattr(self, name)
            plain = empty.new_empty(len(matrices), sum(map(num_rows, matrices.parts)), empty.shape[2])
            for expert in range(len(matrices)):
                plain[expert] = matrices[expert]
            setattr(self, name, nn.Parameter(plain, requires_grad=False))
        self.quantised = {}

    def pack(self) -> None:
        """Bring quantised experts into the layout of a kernel. Raises Unavailable if none takes them."""
        if not self.quantised:
            return
        if self.activation is not SILU:
            raise Unavailable("the experts of this model have another activation than SiLU")
        kinds = kinds_of([part for matrices in self.quantised.values() for part in matrices.parts])
        pack_experts = kernel(
            "pack_experts", kinds if len(self.quantised) == 2 else {*kinds, PLAIN_KIND}, self.ops.kernels
        )
        gate_up, down = (self.quantised[name] for name in self.experts)
        with attempt():
            packed = pack_experts(gate_up, down, self.share)
            self._mix_zeros(packed, 1)
        self.packed, self.quantised = packed, {}

    def compile_kernel(self, num_tokens: int) -> None:
        """Compile the kernels for *num_tokens*, unless they already are. Raises whatever their library raises."""
        if self.packed is not None:
            self._mix_zeros(self.packed, num_tokens)

    def _mix_zeros(self, packed: PackedExperts, num_tokens: int) -> None:
        ids = torch.zeros(num_tokens, 1, dtype=torch.int64, device=self.down_proj.device)
        packed.apply(self.down_proj.new_zeros(num_tokens, self.down_proj.shape[1]), ids, ids.float())

    def forward(self, x_NH: torch.Tensor, expert_ids_NK: torch.Tensor, weights_NK: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum [N, H] of the chosen experts' results, over all ranks.

        *expert_ids_NK* int64 number the experts of all ranks; a token's ids are distinct. *weights_NK* is float32.
        """
        return self.ranks.all_reduce(self.summand(x_NH, expert_ids_NK, weights_NK))

    def summand(self, x_NH: torch.Tensor, expert_ids_NK: torch.Tensor, weights_NK: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the sum that `forward` returns."""
        if self.packed is not None:
            return self.packed.apply(x_NH, expert_ids_NK, weights_NK)
        own_ids_NK = expert_ids_NK - self.first if self.first else expert_ids_NK
        gate_up: ExpertMatrices = self.quantised.get("gate_up_proj", self.gate_up_proj)
        down: ExpertMatrices = self.quantised.get("down_proj", self.down_proj)
        return self.ops.experts(x_NH, gate_up, down, own_ids_NK, weights_NK, self.activation)

"""Mixtures of experts with quantised weights on a CPU: each chosen expert's products, by the kernels for linear layers.

Shapes: N tokens, E width, K experts of a token, M tokens of one expert.
"""

from dataclasses import dataclass

import torch

from saccade.nn.formats import cpu_int4, cpu_int8, onednn_int8
from saccade.nn.formats.quantised import QuantisedExperts, QuantisedLinear, kinds_of
from saccade.nn.ops import SILU, ExpertShare, PackedExperts, PackedLinear, gated_activation, mixture

PACK_LINEAR = {
    "int4": cpu_int4.pack_linear,
    "int8": onednn_int8.pack_linear,
    "w8a16": cpu_int8.pack_linear,
}
"""How a matrix is packed, by its kind of format."""


@dataclass(frozen=True)
class CpuExperts(PackedExperts):
    """The experts of a rank from *first* on: a pair of packed matrices for each."""

    gate_up: tuple[PackedLinear, ...]
    down: tuple[PackedLinear, ...]
    first: int

    def apply(self, x_NE: torch.Tensor, expert_ids_NK: torch.Tensor, weights_NK: torch.Tensor) -> torch.Tensor:
        """See PackedExperts.apply."""

        def result_of(expert: int, rows_ME: torch.Tensor) -> torch.Tensor:
            return self.down[expert].apply(gated_activation(self.gate_up[expert].apply(rows_ME, None), SILU), None)

        return mixture(x_NE, expert_ids_NK - self.first, weights_NK, len(self.down), result_of)


def pack_experts(gate_up: QuantisedExperts, down: QuantisedExperts, share: ExpertShare) -> CpuExperts:
    """Return the packed experts of this rank. Raises Unavailable if a kernel does not take a matrix."""
    first = share.rank * (share.num_experts // share.num_ranks)
    return CpuExperts(_packed(gate_up), _packed(down), first)


def _packed(matrices: QuantisedExperts) -> tuple[PackedLinear, ...]:
    (kind,) = kinds_of(matrices.parts)
    return tuple(PACK_LINEAR[kind](QuantisedLinear(matrices.expert(one), None)) for one in range(len(matrices)))

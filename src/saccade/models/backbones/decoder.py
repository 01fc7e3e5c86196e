"""What text decoders share: the embedding table, and the gated MLP of a layer.

Shapes: N tokens, E hidden size, V vocabulary.
"""

import torch
from torch import nn

from saccade.nn.layers import Layer, Linear
from saccade.nn.ops import SILU
from saccade.nn.parallel import Ranks


class EmbeddingDecoder(nn.Module):
    """A text decoder's embedding table. A subclass adds the layers, `finish` and `forward`."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Module()
        self.embed_tokens.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    @property
    def embedding_VE(self) -> torch.Tensor:
        """The embedding table; the device and dtype of the network are its own."""
        return self.embed_tokens.weight  # type: ignore[return-value]

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Map ids int64 [N] to [N, E]."""
        return self.embedding_VE.index_select(0, input_ids)


class GatedMlp(Layer):
    """down(silu(gate(x)) * up(x)), gate and up from one matrix (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, hidden_size: int, intermediate_size: int, ranks: Ranks, *, bias: bool = False) -> None:
        super().__init__()
        widths = (intermediate_size, intermediate_size)
        self.gate_up_proj = Linear(hidden_size, widths, bias, split="outputs", ranks=ranks)
        self.down_proj = Linear(intermediate_size, hidden_size, bias, split="inputs", ranks=ranks)

    def forward(self, x_NE: torch.Tensor) -> torch.Tensor:
        """Map [N, E] to [N, E]."""
        return self.down_proj(self._gated(x_NE))  # type: ignore[no-any-return]

    def add_to(self, residual_NE: torch.Tensor, x_NE: torch.Tensor) -> torch.Tensor:
        """Return *residual_NE* plus the MLP of *x_NE*."""
        return self.down_proj.add_to(residual_NE, self._gated(x_NE))

    def _gated(self, x_NE: torch.Tensor) -> torch.Tensor:
        return self.ops.gated_activation(self.gate_up_proj(x_NE), SILU)

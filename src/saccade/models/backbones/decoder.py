"""Shared parts of text decoders: the embedding table, a layer's order, its gated MLP, and rotary positions on one axis.

Shapes: N tokens, E hidden size, V vocabulary.
"""

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn

from saccade.models.backbones.rope_scaling import Rope
from saccade.nn.context import ForwardContext
from saccade.nn.layers import Layer, Linear, RMSNorm
from saccade.nn.ops import SILU
from saccade.nn.parallel import Ranks
from saccade.nn.rope import inverse_frequencies


class EmbeddingDecoder(nn.Module):
    """A text decoder's embedding table. A subclass adds the layers, `finish` and `forward`."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Module()
        self.embed_tokens.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    @property
    def embedding_VE(self) -> torch.Tensor:
        """The embedding table, which determines the device and dtype of the network."""
        return self.embed_tokens.weight  # type: ignore[return-value]

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Map ids int64 [N] to [N, E]."""
        return self.embedding_VE.index_select(0, input_ids)


class DecoderLayer(nn.Module):
    """Attention, then the MLP or experts; each reads a normalised input, and its result is added to the residual.

    `add_to` of *attention* takes the residual, its input, the decoder's rotation, and the context; that of *mlp* the
    residual and its input.
    """

    def __init__(self, attention: nn.Module, mlp: nn.Module, hidden_size: int, norm_eps: float) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden_size, norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(hidden_size, norm_eps)
        self.mlp = mlp

    def forward(self, x_NE: torch.Tensor, rotation: Any, context: ForwardContext) -> torch.Tensor:
        """Map [N, E] to [N, E]."""
        x_NE = self.self_attn.add_to(x_NE, self.input_layernorm(x_NE), rotation, context)  # type: ignore[operator]
        return self.mlp.add_to(x_NE, self.post_attention_layernorm(x_NE))  # type: ignore[operator,no-any-return]


class RotaryConfig(Protocol):
    """The configuration of a decoder with rotary positions."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def norm_eps(self) -> float: ...

    @property
    def rope(self) -> Rope: ...


class RotaryDecoder(EmbeddingDecoder):
    """Maps embeddings to hidden states. A token's position is that of the first axis.

    *rotary_width* channels are rotated. A subclass adds `rotation`.
    """

    def __init__(self, config: RotaryConfig, layers: Iterable[nn.Module], rotary_width: int) -> None:
        super().__init__(config.vocab_size, config.hidden_size)
        self.rope, self.rotary_width = config.rope, rotary_width
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.frequencies = torch.empty(0)

    def finish(self) -> None:
        """Compute the values derived from the loaded weights and their device."""
        rope, device = self.rope, self.embedding_VE.device
        self.frequencies = inverse_frequencies(rope.theta, self.rotary_width, device, rope.divisors)

    def rotation(self, angles: torch.Tensor, dtype: torch.dtype) -> Any:
        """Return the rotation for the layers' attention, from angles [N, rotary_width / 2]."""
        raise NotImplementedError

    def forward(self, x_NE: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Return normalised hidden states [N, E]."""
        rotation = self.rotation(context.positions[0].unsqueeze(1) * self.frequencies, x_NE.dtype)
        for layer in self.layers:
            x_NE = layer(x_NE, rotation, context)
        return self.norm(x_NE)  # type: ignore[no-any-return]


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

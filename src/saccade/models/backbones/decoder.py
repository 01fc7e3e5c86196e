"""Shared parts of text decoders: the embedding table, the layers and their order, the MLP, and rotary positions.

Shapes: N tokens, E hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from saccade.models.backbones.text_config import DecoderConfig
from saccade.nn.context import ForwardContext
from saccade.nn.layers import Embedding, Layer, Linear, RMSNorm
from saccade.nn.ops import SILU, Activation
from saccade.nn.parallel import Ranks
from saccade.nn.rope import chunked_axes, cos_sin, interleaved_axes, inverse_frequencies

Norm = Callable[[int, float], nn.Module]
"""A norm's class; takes the number of channels and the epsilon."""


class DecoderLayer(nn.Module):
    """A token mixer, then the MLP or experts. Each reads a normalised input and adds its result to the residual.

    *mixer*, which checkpoints call *mixer_name*, has an `add_to` that takes the residual, its input, the decoder's
    rotation, and the context. The `add_to` of *mlp* takes the residual and its input.
    """

    def __init__(
        self,
        config: DecoderConfig,
        mixer: nn.Module,
        mlp: nn.Module,
        norm: Norm = RMSNorm,
        mixer_name: str = "self_attn",
    ) -> None:
        super().__init__()
        self.input_layernorm = norm(config.hidden_size, config.norm_eps)
        self.mixer_name = mixer_name
        self.add_module(mixer_name, mixer)
        self.post_attention_layernorm = norm(config.hidden_size, config.norm_eps)
        self.mlp = mlp

    def forward(self, x_NE: torch.Tensor, rotation: Any, context: ForwardContext) -> torch.Tensor:
        """Map [N, E] to [N, E]."""
        mixer = getattr(self, self.mixer_name)
        x_NE = mixer.add_to(x_NE, self.input_layernorm(x_NE), rotation, context)
        return self.mlp.add_to(x_NE, self.post_attention_layernorm(x_NE))  # type: ignore[operator,no-any-return]


class TextDecoder(nn.Module):
    """Maps embeddings to hidden states. It can add features at chosen rows after the first layers."""

    def __init__(self, config: DecoderConfig, ranks: Ranks, layers: Iterable[nn.Module], norm: Norm = RMSNorm) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, ranks)
        self.layers = nn.ModuleList(layers)
        self.norm = norm(config.hidden_size, config.norm_eps)
        self.axes = self.frequencies = torch.empty(0)

    @property
    def embedding_VE(self) -> torch.Tensor:
        """This rank's part of the embedding table, which determines the device and dtype of the network."""
        return self.embed_tokens.weight

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Map int64 ids [N] to embeddings [N, E]."""
        return self.embed_tokens(input_ids)  # type: ignore[no-any-return]

    def finish(self) -> None:
        """Compute the tensors for rotary positions on the loaded weights' device."""
        rope, device = self.config.rope, self.embedding_VE.device
        num_pairs = len(rope.divisors)
        axes = interleaved_axes if self.config.style.axes == "interleaved" else chunked_axes
        self.axes = torch.tensor(axes(self.config.mrope_section or (num_pairs, 0, 0)), device=device)
        self.frequencies = inverse_frequencies(rope.theta, 2 * num_pairs, device, rope.divisors)

    def rotation(self, angles: torch.Tensor, dtype: torch.dtype) -> Any:
        """Return the rotation for the layers' mixers, from one angle for each token and channel pair."""
        return cos_sin(angles, dtype, self.config.rope.magnitude)

    def rotation_at(self, positions: torch.Tensor, dtype: torch.dtype) -> Any:
        """Return the rotation for tokens at *positions* int64 [3, N].

        Each channel pair follows one of the three axes.
        """
        return self.rotation(positions.index_select(0, self.axes).t() * self.frequencies, dtype)

    def forward(
        self,
        x_NE: torch.Tensor,
        context: ForwardContext,
        rows: torch.Tensor | None = None,
        features: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        """Return normalised hidden states [N, E]; features[i] is added at *rows* after layer i."""
        rotation = self.rotation_at(context.positions, x_NE.dtype)
        for index, layer in enumerate(self.layers):
            x_NE = layer(x_NE, rotation, context)
            if rows is not None and index < len(features):
                x_NE.index_add_(0, rows, features[index])
        return self.norm(x_NE)  # type: ignore[no-any-return]


class GatedMlp(Layer):
    """Computes down(activation(gate(x)) * up(x)), with gate and up in one matrix (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        ranks: Ranks,
        *,
        bias: bool = False,
        activation: Activation = SILU,
    ) -> None:
        super().__init__()
        self.activation = activation
        widths = (intermediate_size, intermediate_size)
        self.gate_up_proj = Linear(hidden_size, widths, bias, split="outputs", ranks=ranks)
        self.down_proj = Linear(intermediate_size, hidden_size, bias, split="inputs", ranks=ranks)

    def forward(self, x_NE: torch.Tensor) -> torch.Tensor:
        """Map [N, E] to [N, E]."""
        return self.down_proj(self._gated(x_NE))  # type: ignore[no-any-return]

    def add_to(self, residual_NE: torch.Tensor, x_NE: torch.Tensor) -> torch.Tensor:
        """Return *residual_NE* plus the MLP of *x_NE*."""
        return self.down_proj.add_to(residual_NE, self._gated(x_NE))

    def summand(self, x_NE: torch.Tensor) -> torch.Tensor:
        """Return this rank's summand; the ranks' summands add up to `forward` if there are no biases."""
        return self.down_proj.summand(self._gated(x_NE))

    def add_summand(self, addend_NE: torch.Tensor, x_NE: torch.Tensor) -> torch.Tensor:
        """Return *addend_NE* plus `summand` of *x_NE*; may overwrite *addend_NE*."""
        return self.down_proj.add_summand(addend_NE, self._gated(x_NE))

    def _gated(self, x_NE: torch.Tensor) -> torch.Tensor:
        return self.gate_up_proj(x_NE, self._gate)  # type: ignore[no-any-return]

    def _gate(self, gates_and_ups: torch.Tensor) -> torch.Tensor:
        return self.ops.gated_activation(gates_and_ups, self.activation)

"""InternViT, a projector with pixel shuffle, and the text decoder.

Formulas: transformers 5.23, modeling_internvl.py. Shapes: V views, P patches of a view, T tokens of all views, H heads,
D values of a patch or a head, C channels of the vision tower, E hidden size, U image tokens. A view has a class token.
"""

from collections.abc import Iterator

import torch
from torch import nn

from saccade.errors import StartupError
from saccade.models.backbones.clip_vision import (
    ClipAttention,
    ClipBlock,
    ClipEmbeddings,
    MlpProjector,
    ViewMetadata,
    ViewTower,
    joined_squares,
)
from saccade.models.backbones.tiled_network import TiledNetwork
from saccade.models.internvl.layout import Layout
from saccade.models.internvl.settings import InternConfig
from saccade.models.internvl.spec import Spec
from saccade.models.internvl.weights import target
from saccade.nn.layers import LayerNorm, Linear, RMSNorm
from saccade.nn.layerwise import Layerwise
from saccade.nn.parallel import Ranks

PROJECTOR_EPS = 1e-5


class InternAttention(ClipAttention):
    """InternViT's attention. Some towers normalise queries and keys over all heads."""

    def __init__(self, config: InternConfig, ranks: Ranks) -> None:
        super().__init__(config.hidden_size, config.num_heads, ranks, config.qkv_bias)
        if config.qk_norm and ranks.size > 1:
            raise StartupError(
                "`--mm-encoder-tp-mode weights` cannot cut this vision tower, because it normalises queries and keys "
                "over all heads; use `data`."
            )
        norms = (RMSNorm(config.hidden_size, config.norm_eps) if config.qk_norm else nn.Identity() for _ in range(2))
        self.q_norm, self.k_norm = norms

    def add_to(self, residual_TC: torch.Tensor, x_TC: torch.Tensor, metadata: ViewMetadata) -> torch.Tensor:
        """Attend over *x_TC*, and return the residual plus the result."""
        q_TC, k_TC, v_TC = self.qkv_proj(x_TC).chunk(3, dim=1)
        parts = (self.q_norm(q_TC), self.k_norm(k_TC), v_TC)
        q_THD, k_THD, v_THD = (part.unflatten(1, (self.num_heads, -1)) for part in parts)
        return self.out_proj.add_to(residual_TC, metadata.backend.packed((q_THD, k_THD, v_THD), metadata.layout))


class InternBlock(ClipBlock):
    """A block that scales the results of attention and MLP channel by channel, and adds them to the residual."""

    def __init__(self, config: InternConfig, ranks: Ranks) -> None:
        super().__init__(config, ranks, RMSNorm if config.rms_norm else LayerNorm)
        self.self_attn = InternAttention(config, ranks)
        self.lambda_1 = nn.Parameter(torch.empty(config.hidden_size), requires_grad=False)
        self.lambda_2 = nn.Parameter(torch.empty(config.hidden_size), requires_grad=False)
        for linear, _ in self._scaled():
            linear.is_as_stored = False

    def finish(self) -> None:
        """Multiply the scales into the loaded layers whose results are added to the residual."""
        for linear, scale_C in self._scaled():
            linear.make_plain()
            for parameter in linear.parameters():
                parameter.data *= scale_C.unsqueeze(1) if parameter.ndim == 2 else scale_C

    def _scaled(self) -> Iterator[tuple[Linear, torch.Tensor]]:
        """Yield the layers whose results are scaled, with their scales."""
        yield self.self_attn.out_proj, self.lambda_1
        yield self.mlp.fc2, self.lambda_2  # type: ignore[misc]


class InternTower(ViewTower):
    """InternViT: CLIP's blocks with scales, and no norm before or after them."""

    def __init__(self, config: InternConfig, ranks: Ranks) -> None:
        blocks = (InternBlock(config, ranks) for _ in range(config.depth))
        super().__init__(ClipEmbeddings(config, bias=True, has_ones=True), blocks, 1 + config.num_patches)

    def forward(self, patches_TD: torch.Tensor, metadata: ViewMetadata) -> Layerwise:
        """Map normalised patches to hidden states of patches [V, P, C]."""
        return (yield from super().forward(patches_TD, metadata))[:, 1:]


class Projector(MlpProjector):
    """Joins squares of patches, normalises them, and maps them to the text network's width."""

    def __init__(self, spec: Spec) -> None:
        joined = spec.vision.hidden_size * spec.scale**2
        super().__init__(joined, spec.text.hidden_size)
        self.scale = spec.scale
        self.layer_norm = LayerNorm(joined, PROJECTOR_EPS)

    def forward(self, x_VPC: torch.Tensor) -> torch.Tensor:
        """Map [V, P, C] to [U, E]."""
        return super().forward(self.layer_norm(joined_squares(x_VPC, self.scale)))


class Network(TiledNetwork):
    """The family's network in the engine. Parameters are empty until the loader has filled them and called `finish`."""

    layout, tower, projection = Layout, InternTower, Projector
    target = staticmethod(target)

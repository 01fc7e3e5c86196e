"""SigLIP's tower, a projector that averages squares of patches, and Gemma 3's decoder.

Formulas: transformers 5.23, modeling_gemma3.py (Gemma3MultiModalProjector). Shapes: V images, P patches of an image, C
channels of the tower, U image tokens, E hidden size.
"""

import torch
from torch import nn

from saccade.models.backbones.siglip_vision import SiglipTower
from saccade.models.backbones.tiled_network import TiledNetwork
from saccade.models.backbones.windowed_text import WindowedDecoder
from saccade.models.gemma3.layout import Layout
from saccade.models.gemma3.spec import Spec
from saccade.models.gemma3.weights import target
from saccade.nn.layers import Linear, OffsetNorm


class Projector(nn.Module):
    """Averages *scale* x *scale* patches, normalises the means, and maps them to the text network's width."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.scale, self.side = spec.scale, spec.vision.side
        self.norm = OffsetNorm(spec.vision.hidden_size, spec.vision.norm_eps)
        self.proj = Linear(spec.vision.hidden_size, spec.text.hidden_size, bias=False)
        # Checkpoints have its transpose, as a bare parameter.
        self.proj.is_as_stored = False

    def forward(self, x_VPC: torch.Tensor) -> torch.Tensor:
        """Map [V, P, C] to [U, E]."""
        squares = x_VPC.unflatten(1, (self.side // self.scale, self.scale, self.side // self.scale, self.scale))
        return self.proj(self.norm(squares.mean((2, 4)).flatten(0, 2)))  # type: ignore[no-any-return]


class Network(TiledNetwork):
    """The family's network in the engine. Parameters are empty until the loader has filled them and called `finish`."""

    layout, decoder, tower, projection = Layout, WindowedDecoder, SiglipTower, Projector
    target = staticmethod(target)

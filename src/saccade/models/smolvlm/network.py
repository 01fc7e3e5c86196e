"""The network of Idefics3 and SmolVLM: the vision tower, connector and text decoder.

Formulas: transformers 5.23, modeling_idefics3.py and modeling_smolvlm.py, which compute the same. Shapes: V views, P
patches of a view, T patches of all views, D values per patch, C channels of the vision tower, E hidden size, U image
tokens.
"""

import torch
from torch import nn

from saccade.models.backbones.clip_vision import joined_squares
from saccade.models.backbones.siglip_vision import SiglipEmbeddings, SiglipTower
from saccade.models.backbones.tiled_network import TiledNetwork
from saccade.models.smolvlm.layout import Layout
from saccade.models.smolvlm.spec import Spec
from saccade.models.smolvlm.weights import target
from saccade.nn.layers import Linear


class RoundedEmbeddings(SiglipEmbeddings):
    """SigLIP's embeddings, in which each patch's table entry comes from its rounded position."""

    def finish(self) -> None:
        """Choose the entry of each patch from the loaded table."""
        super().finish()
        self.positions_PC = self.positions_PC.index_select(0, position_ids(self.side).to(self.positions_PC.device))


class Tower(SiglipTower):
    """The tower of Idefics3."""

    embedding_class = RoundedEmbeddings


class Connector(nn.Module):
    """Joins the channels of *scale* x *scale* patches, and maps them to the text network's width."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.scale = spec.scale
        self.proj = Linear(spec.vision.hidden_size * spec.scale**2, spec.text.hidden_size, bias=False)

    def forward(self, x_VPC: torch.Tensor) -> torch.Tensor:
        """Map [V, P, C] to [U, E]."""
        return self.proj(joined_squares(x_VPC, self.scale))  # type: ignore[no-any-return]


class Network(TiledNetwork):
    """The family's network in the engine. Parameters are empty until the loader has filled them and called `finish`."""

    layout, tower, projection = Layout, Tower, Connector
    target = staticmethod(target)


def position_ids(side: int) -> torch.Tensor:
    """Return each patch's entry in the position table, int64 [P], for a view of *side* x *side* patches.

    Formula: modeling_idefics3.py, Idefics3VisionEmbeddings, for a view without padding. The float32 rounding is kept,
    because it decides the entry of a patch on the border between two.
    """
    borders = torch.arange(1 / side, 1.0, 1 / side, dtype=torch.float32)
    places = (torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))).clamp(max=1.0 - 1e-6)
    entries = torch.bucketize(places, borders, right=True)
    return (entries.unsqueeze(1) * side + entries).flatten()

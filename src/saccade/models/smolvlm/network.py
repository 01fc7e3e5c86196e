"""Vision tower, connector and text decoder.

Formulas: transformers 5.23, modeling_idefics3.py and modeling_smolvlm.py, which compute the same. Shapes: V views, P
patches of a view, T patches of all views, D values of a patch, C channels of the vision tower, E hidden size, U tokens
of images.
"""

from typing import ClassVar

import torch
from torch import nn

from saccade.models.backbones.clip_config import ClipConfig
from saccade.models.backbones.clip_vision import ClipBlock, ViewMetadata, ViewTower, joined_squares
from saccade.models.backbones.tiled_network import TiledNetwork
from saccade.models.preprocessing.processor_config import CHANNELS
from saccade.models.smolvlm.layout import Layout
from saccade.models.smolvlm.spec import Spec
from saccade.models.smolvlm.weights import target
from saccade.nn.layers import LayerNorm, Linear
from saccade.nn.parallel import Ranks
from saccade.nn.vision import PatchEmbedding


class SiglipEmbeddings(nn.Module):
    """The embedded patches of each view, plus learned positions."""

    def __init__(self, config: ClipConfig) -> None:
        super().__init__()
        self.side = config.side
        self.patch_embedding = PatchEmbedding(config.hidden_size, (CHANNELS, config.patch_size, config.patch_size))
        self.position_embedding = nn.Module()
        table_PC = torch.empty(config.num_patches, config.hidden_size)
        self.position_embedding.weight = nn.Parameter(table_PC, requires_grad=False)
        self.positions_PC = torch.empty(0)

    def finish(self) -> None:
        """Take the entries of the loaded table, one for each patch."""
        table_PC: torch.Tensor = self.position_embedding.weight  # type: ignore[assignment]
        self.positions_PC = table_PC.detach()

    def forward(self, patches_TD: torch.Tensor) -> torch.Tensor:
        """Map the patches of all views to [T, C]."""
        patches_VPC = self.patch_embedding(patches_TD).unflatten(0, (-1, self.side**2))
        return (patches_VPC + self.positions_PC).flatten(0, 1)  # type: ignore[no-any-return]


class SiglipTower(ViewTower):
    """SigLIP's vision tower (Zhai et al. 2023, arXiv:2303.15343): as CLIP's, without class token and first norm.

    A family may have an *embedding_class* of its own.
    """

    embedding_class: ClassVar[type[SiglipEmbeddings]] = SiglipEmbeddings

    def __init__(self, config: ClipConfig, ranks: Ranks) -> None:
        blocks = (ClipBlock(config, ranks) for _ in range(config.depth))
        super().__init__(self.embedding_class(config), blocks, config.num_patches)
        self.post_layernorm = LayerNorm(config.hidden_size, config.norm_eps)

    def forward(self, patches_TD: torch.Tensor, metadata: ViewMetadata) -> torch.Tensor:
        """Map normalised patches to hidden states [V, P, C], after the tower's last norm."""
        return self.post_layernorm(super().forward(patches_TD, metadata))  # type: ignore[no-any-return]


class RoundedEmbeddings(SiglipEmbeddings):
    """The entry of each patch comes from its place, as a number that is rounded."""

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
    """The engine's network of the family. Parameters are empty until the loader has filled them and called `finish`."""

    layout, tower, projection = Layout, Tower, Connector
    target = staticmethod(target)


def position_ids(side: int) -> torch.Tensor:
    """Return the entry of the position table for each patch of a view of *side* x *side* patches, int64 [P].

    Formula: modeling_idefics3.py, Idefics3VisionEmbeddings, for a view without padding. Its rounding in float32 is
    kept: it decides the entry of a patch on the border between two.
    """
    borders = torch.arange(1 / side, 1.0, 1 / side, dtype=torch.float32)
    places = (torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))).clamp(max=1.0 - 1e-6)
    entries = torch.bucketize(places, borders, right=True)
    return (entries.unsqueeze(1) * side + entries).flatten()

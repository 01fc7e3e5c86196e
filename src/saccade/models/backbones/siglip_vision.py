"""SigLIP's vision tower: maps square images to hidden states (Zhai et al. 2023, arXiv:2303.15343).

Formulas: transformers 5.23, modeling_siglip.py (SiglipVision*). Shapes: V views, P patches of a view, T patches of all
views, D values per patch, C channels.
"""

from typing import ClassVar

import torch
from torch import nn

from saccade.models.backbones.clip_config import ClipConfig
from saccade.models.backbones.clip_vision import ClipBlock, ViewMetadata, ViewTower
from saccade.models.preprocessing.processor_config import CHANNELS
from saccade.nn.layers import LayerNorm
from saccade.nn.layerwise import Layerwise
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
        """Take the positions from the loaded table, one entry per patch."""
        table_PC: torch.Tensor = self.position_embedding.weight  # type: ignore[assignment]
        self.positions_PC = table_PC.detach()

    def forward(self, patches_TD: torch.Tensor) -> torch.Tensor:
        """Map the patches of all views to [T, C]."""
        patches_VPC = self.patch_embedding(patches_TD).unflatten(0, (-1, self.side**2))
        return (patches_VPC + self.positions_PC).flatten(0, 1)  # type: ignore[no-any-return]


class SiglipTower(ViewTower):
    """SigLIP's tower (Zhai et al. 2023, arXiv:2303.15343): like CLIP's, but without a class token or a first norm.

    A family may set its own *embedding_class*.
    """

    embedding_class: ClassVar[type[SiglipEmbeddings]] = SiglipEmbeddings

    def __init__(self, config: ClipConfig, ranks: Ranks) -> None:
        blocks = (ClipBlock(config, ranks) for _ in range(config.depth))
        super().__init__(self.embedding_class(config), blocks, config.num_patches)
        self.post_layernorm = LayerNorm(config.hidden_size, config.norm_eps)

    def forward(self, patches_TD: torch.Tensor, metadata: ViewMetadata) -> Layerwise:
        """Map normalised patches to hidden states [V, P, C], after the tower's last norm."""
        return self.post_layernorm((yield from super().forward(patches_TD, metadata)))  # type: ignore[no-any-return]

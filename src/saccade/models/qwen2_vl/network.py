"""The network: a tower without learned positions, and a text decoder with biases of queries, keys and values.

Formulas: transformers, modeling_qwen2_vl.py (Qwen2VisionTransformerPretrainedModel). Shapes: P patches, C values of a
patch, E width of the tower, U merged patches, X width of the text model.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from saccade.models.backbones.qwen_config import TowerConfig
from saccade.models.backbones.qwen_network import QwenNetwork
from saccade.models.backbones.qwen_vision import (
    BlockMetadata,
    PatchMerger,
    VisionBlock,
    VisionMlp,
    axial_cos_sin,
)
from saccade.models.network import Target
from saccade.models.qwen2_vl.layout import Layout
from saccade.models.qwen2_vl.weights import locate
from saccade.models.spec import Grid
from saccade.nn.context import VisionAttentionBackend
from saccade.nn.parallel import ALONE, Ranks
from saccade.nn.transfer import to_device
from saccade.nn.vision import PatchEmbedding, frame_coordinates, packed_layout


class Qwen2VisionTower(nn.Module):
    """Maps patches to features in the text network's space. Each frame attends to itself."""

    def __init__(self, config: TowerConfig, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.config = config
        kernel = (config.channels, config.temporal_patch_size, config.patch_size, config.patch_size)
        self.patch_embed = nn.ModuleDict({"proj": PatchEmbedding(config.hidden_size, kernel, bias=False)})
        self.blocks = nn.ModuleList(
            VisionBlock(config, VisionMlp(config, ranks), ranks=ranks) for _ in range(config.depth)
        )
        self.merger = PatchMerger(config, ranks)

    def finish(self) -> None:
        """Compute the values derived from the loaded weights."""
        self.patch_embed["proj"].fold()  # type: ignore[operator]
        for block in self.blocks:
            block.attn.pair()  # type: ignore[union-attr,operator]

    def prepare(self, grids: Sequence[Grid], backend: VisionAttentionBackend) -> BlockMetadata:
        """Return the metadata of *grids*, computed on the host and copied without a device sync."""
        device = self.merger.linear_fc1.weight.device
        frames = (frame_coordinates(grid, self.config.merge_size) for grid in grids for _ in range(grid[0]))
        places_P2 = to_device(np.concatenate(list(frames)), device)
        return BlockMetadata(packed_layout(grids, device), axial_cos_sin(places_P2, self.config.head_dim), backend)

    def forward_blocks(self, patches_PC: torch.Tensor, metadata: BlockMetadata) -> torch.Tensor:
        """Map normalised patches to the last block's output [P, E]."""
        x_PE = self.patch_embed["proj"](patches_PC)
        for block in self.blocks:
            x_PE = block(x_PE, metadata)
        return x_PE  # type: ignore[no-any-return]

    def forward(self, patches_PC: torch.Tensor, metadata: BlockMetadata) -> torch.Tensor:
        """Map normalised patches to features [U, X]."""
        return self.merger(self.forward_blocks(patches_PC, metadata))  # type: ignore[no-any-return]


class Network(QwenNetwork):
    """The engine's network of the family."""

    layout = Layout
    tower = Qwen2VisionTower

    def locate(self, name: str) -> Target | None:
        """Return the parameter that the checkpoint's tensor *name* fills; None if the tensor is not needed."""
        return locate(name, self.loads_head)

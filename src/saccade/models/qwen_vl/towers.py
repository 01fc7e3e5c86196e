"""The vision towers, which map patches to features in the text network's space.

Formulas: transformers, modeling_qwen2_5_vl.py (Qwen2_5_VisionTransformerPretrainedModel) and modeling_qwen3_vl.py
(Qwen3VLVision*); Qwen2-VL's tower is `backbones/merging_tower.py`, which also has the parts of the others. Shapes: P
patches, C channels * height * width of a patch, E hidden size, U merged patches, X text width, W = X * features per
token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from saccade.models.backbones.merging_tower import (
    BlockMetadata,
    GatedTowerMlp,
    LearnedMetadata,
    LearnedTower,
    MergingTower,
    PatchMerger,
    axial_cos_sin,
)
from saccade.models.qwen_vl.tower_config import Tower3Config, WindowedConfig
from saccade.models.spec import Grid
from saccade.nn.context import VisionAttentionBackend
from saccade.nn.layers import RMSNorm
from saccade.nn.layerwise import Layerwise
from saccade.nn.parallel import ALONE, Ranks
from saccade.nn.transfer import to_device
from saccade.nn.vision import frame_coordinates, packed_layout, packed_sequences


@lru_cache(maxsize=32)
def frame_windows(rows: int, columns: int, side: int) -> tuple[npt.NDArray[np.int64], tuple[int, ...]]:
    """Return the order of one frame's merged patches, window after window, and the windows' sizes.

    Windows have side * side merged patches, fewer at the right and lower borders. Windows of equal size are next to
    each other, so that attention can process them together; the order of windows does not change the result. The array
    is cached: do not write to it.
    """
    row, column = np.divmod(np.arange(rows * columns), columns)
    window = row // side * -(-columns // side) + column // side
    sizes = np.bincount(window)
    order = np.lexsort((window, -sizes[window]))
    return order, tuple(sorted(sizes.tolist(), reverse=True))


@dataclass(frozen=True, slots=True)
class WindowedMetadata:
    """The metadata that depends only on grids. Blocks that attend within windows read *windows*, the others *frames*.

    *order* int64 [U] puts merged patches into the order of windows, and *restored* int64 [U] puts them back.
    """

    windows: BlockMetadata
    frames: BlockMetadata
    order: torch.Tensor
    restored: torch.Tensor


class WindowedTower(MergingTower):
    """Qwen2.5-VL's tower, in which most blocks attend within windows."""

    norm, mlp = RMSNorm, GatedTowerMlp
    config: WindowedConfig

    def prepare(self, grids: Sequence[Grid], backend: VisionAttentionBackend) -> WindowedMetadata:
        merge, device = self.config.merge_size, self.device
        orders: list[npt.NDArray[np.int64]] = []
        places: list[npt.NDArray[np.float32]] = []
        sizes: list[int] = []
        start = 0
        for frame in [grid for grid in grids for _ in range(grid[0])]:
            frame_order, frame_sizes = frame_windows(frame[1] // merge, frame[2] // merge, self.config.window)
            orders.append(frame_order + start)
            places.append(frame_coordinates(frame, merge).reshape(len(frame_order), -1)[frame_order])
            sizes += frame_sizes
            start += len(frame_order)
        order_U = np.concatenate(orders)
        host = (np.concatenate(places).reshape(-1, 2), order_U, np.argsort(order_U))
        places_P2, order, restored = (to_device(array, device) for array in host)
        cos_sin = axial_cos_sin(places_P2, self.config.head_dim)
        windows = packed_sequences(tuple(size * merge**2 for size in sizes), device, backend)
        return WindowedMetadata(
            BlockMetadata(windows, cos_sin, backend),
            BlockMetadata(packed_layout(grids, device, backend), cos_sin, backend),
            order,
            restored,
        )

    def forward(self, patches_PC: torch.Tensor, metadata: WindowedMetadata) -> Layerwise:
        """Map normalised patches to features [U, X], in the patches' order."""
        x_PE = self.patch_embed["proj"](patches_PC)
        x_PE = x_PE.view(len(metadata.order), -1).index_select(0, metadata.order).view_as(x_PE)
        for index, block in enumerate(self.blocks):
            x_PE = block(x_PE, metadata.frames if index in self.config.full_blocks else metadata.windows)
            yield
        return self.merger(x_PE).index_select(0, metadata.restored)  # type: ignore[no-any-return]


class Tower3(LearnedTower):
    """Qwen3-VL's tower, with learned positions and features from deepstack blocks."""

    config: Tower3Config

    def __init__(self, config: Tower3Config, ranks: Ranks = ALONE) -> None:
        super().__init__(config, ranks)
        self.deepstack_merger_list = nn.ModuleList(
            PatchMerger(config, ranks, norm_merged=True) for _ in config.deepstack_layers
        )

    def forward(self, patches_PC: torch.Tensor, metadata: LearnedMetadata) -> Layerwise:
        """Map normalised patches to [U, W]: the main features, then one slice for each deepstack block."""
        x_PE = self.embed(patches_PC, metadata)
        deep: dict[int, torch.Tensor] = {}
        for index, block in enumerate(self.blocks):
            x_PE = block(x_PE, metadata.block)
            if index in self.config.deepstack_layers:
                # Merge now: later blocks may overwrite the tensor that they add to.
                deep[index] = self.deepstack_merger_list[self.config.deepstack_layers.index(index)](x_PE)
            yield
        return torch.cat([self.merger(x_PE), *(deep[layer] for layer in self.config.deepstack_layers)], dim=-1)

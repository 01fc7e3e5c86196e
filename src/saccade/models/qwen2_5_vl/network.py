"""The network: a tower with attention within windows, and a text decoder with biases of queries, keys and values.

Formulas: transformers, modeling_qwen2_5_vl.py (Qwen2_5_VisionTransformerPretrainedModel). Shapes: P patches, C values
of a patch, E width of the tower, U merged patches, X width of the text model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from saccade.models.backbones.qwen_network import QwenNetwork
from saccade.models.backbones.qwen_vision import BlockMetadata, PatchMerger, VisionBlock, axial_cos_sin
from saccade.models.network import Target
from saccade.models.qwen2_5_vl.layout import Layout
from saccade.models.qwen2_5_vl.spec import WindowedConfig
from saccade.models.qwen2_5_vl.weights import locate
from saccade.models.spec import Grid
from saccade.nn.context import VisionAttentionBackend
from saccade.nn.layers import Layer, Linear, RMSNorm
from saccade.nn.ops import ACTIVATIONS
from saccade.nn.parallel import ALONE, Ranks
from saccade.nn.transfer import to_device
from saccade.nn.vision import PatchEmbedding, frame_coordinates, packed_layout, packed_sequences


@lru_cache(maxsize=32)
def frame_windows(rows: int, columns: int, side: int) -> tuple[npt.NDArray[np.int64], tuple[int, ...]]:
    """Return an order of the merged patches of one frame, window after window, and the windows' sizes.

    Windows have side * side merged patches, less at the right and lower border. Equal windows are neighbours, so that
    they can be attended together; the order of windows changes no result. The array is cached: do not write to it.
    """
    row, column = np.divmod(np.arange(rows * columns), columns)
    window = row // side * -(-columns // side) + column // side
    sizes = np.bincount(window)
    order = np.lexsort((window, -sizes[window]))
    return order, tuple(sorted(sizes.tolist(), reverse=True))


@dataclass(frozen=True, slots=True)
class WindowedMetadata:
    """The metadata that depends only on grids. Blocks that attend within windows read *windows*, the others *frames*.

    *order* int64 [U] puts merged patches into the order of windows, *restored* int64 [U] puts them back.
    """

    windows: BlockMetadata
    frames: BlockMetadata
    order: torch.Tensor
    restored: torch.Tensor


class VisionGatedMlp(Layer):
    """down(activation(gate(x)) * up(x)), with biases."""

    def __init__(self, config: WindowedConfig, ranks: Ranks) -> None:
        super().__init__()
        width = config.intermediate_size
        self.gate_up_proj = Linear(config.hidden_size, (width, width), split="outputs", ranks=ranks)
        self.down_proj = Linear(width, config.hidden_size, split="inputs", ranks=ranks)
        self.activation = ACTIVATIONS[config.activation]

    def add_to(self, residual_PE: torch.Tensor, x_PE: torch.Tensor) -> torch.Tensor:
        """Return *residual_PE* plus the MLP of *x_PE*."""
        gated = self.ops.gated_activation(self.gate_up_proj(x_PE), self.activation)
        return self.down_proj.add_to(residual_PE, gated)


class WindowedTower(nn.Module):
    """Maps patches to features in the text network's space."""

    def __init__(self, config: WindowedConfig, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.config = config
        kernel = (config.channels, config.temporal_patch_size, config.patch_size, config.patch_size)
        self.patch_embed = nn.ModuleDict({"proj": PatchEmbedding(config.hidden_size, kernel, bias=False)})
        self.blocks = nn.ModuleList(
            VisionBlock(config, VisionGatedMlp(config, ranks), RMSNorm, ranks) for _ in range(config.depth)
        )
        self.merger = PatchMerger(config, ranks, norm=RMSNorm)

    def finish(self) -> None:
        """Compute the values derived from the loaded weights."""
        self.patch_embed["proj"].fold()  # type: ignore[operator]
        for block in self.blocks:
            block.attn.pair()  # type: ignore[union-attr,operator]

    def prepare(self, grids: Sequence[Grid], backend: VisionAttentionBackend) -> WindowedMetadata:
        """Return the metadata of *grids*, computed on the host and copied without a device sync."""
        merge, device = self.config.merge_size, self.merger.linear_fc1.weight.device
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
        windows = packed_sequences(tuple(size * merge**2 for size in sizes), device)
        return WindowedMetadata(
            BlockMetadata(windows, cos_sin, backend),
            BlockMetadata(packed_layout(grids, device), cos_sin, backend),
            order,
            restored,
        )

    def forward_blocks(self, patches_PC: torch.Tensor, metadata: WindowedMetadata) -> torch.Tensor:
        """Map normalised patches to the last block's output [P, E], in the order of windows."""
        x_PE = self.patch_embed["proj"](patches_PC)
        merged = x_PE.view(len(metadata.order), -1)
        x_PE = merged.index_select(0, metadata.order).view_as(x_PE)
        for index, block in enumerate(self.blocks):
            x_PE = block(x_PE, metadata.frames if index in self.config.full_blocks else metadata.windows)
        return x_PE  # type: ignore[no-any-return]

    def forward(self, patches_PC: torch.Tensor, metadata: WindowedMetadata) -> torch.Tensor:
        """Map normalised patches to features [U, X], in the order of patches."""
        merged = self.merger(self.forward_blocks(patches_PC, metadata))
        return merged.index_select(0, metadata.restored)  # type: ignore[no-any-return]


class Network(QwenNetwork):
    """The engine's network of the family."""

    layout = Layout
    tower = WindowedTower

    def locate(self, name: str) -> Target | None:
        """Return the parameter that the checkpoint's tensor *name* fills; None if the tensor is not needed."""
        return locate(name, self.loads_head)

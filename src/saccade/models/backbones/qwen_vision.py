"""Qwen's vision tower with learned, resampled positions and 2-D rotary attention, and the mergers behind it.

Formulas: transformers, modeling_qwen3_vl.py (Qwen3VLVision*). Encoder contract: `prepare` does all that depends on
grids, on the host; `forward_blocks` then runs without a device sync; `merge` projects into the text network's space.
Shapes: P patches, C channels * height * width of a patch, E hidden size, D head size, U merged patches, X text width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from saccade.errors import StartupError
from saccade.models.backbones.configuration import choice, integer
from saccade.nn.activation import ACTIVATIONS, GELU
from saccade.nn.context import Backend, PackedLayout
from saccade.nn.linear import Linear
from saccade.nn.norm import LayerNorm
from saccade.nn.rope import inverse_frequencies, pair_rotation
from saccade.nn.vision import (
    FramePlaces,
    Grid,
    PackedSelfAttention,
    PatchEmbedding,
    frame_places,
    packed_layout,
)

NORM_EPS = 1e-6
ROPE_THETA = 10000.0


@dataclass(frozen=True)
class VisionConfig:
    """The vision half of config.json, checked. *deepstack_layers* are the blocks whose output is merged as well."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    side: int
    patch_size: int
    merge_size: int
    temporal_patch_size: int
    channels: int
    activation: str
    deepstack_layers: tuple[int, ...]

    @classmethod
    def read(cls, vision: Mapping[str, Any]) -> "VisionConfig":
        """Read `vision_config`. Raises StartupError, naming the key."""
        num_positions = integer(vision, "num_position_embeddings")
        side = round(num_positions**0.5)
        if side * side != num_positions:
            raise StartupError(f"config.json: `num_position_embeddings` must be a square, not {num_positions}.")
        config = cls(
            depth=integer(vision, "depth"),
            hidden_size=integer(vision, "hidden_size"),
            intermediate_size=integer(vision, "intermediate_size"),
            num_heads=integer(vision, "num_heads"),
            out_hidden_size=integer(vision, "out_hidden_size"),
            side=side,
            patch_size=integer(vision, "patch_size"),
            merge_size=integer(vision, "spatial_merge_size"),
            temporal_patch_size=integer(vision, "temporal_patch_size"),
            channels=integer(vision, "in_channels"),
            activation=choice(vision, "hidden_act", tuple(ACTIVATIONS)),
            deepstack_layers=_deepstack_layers(vision),
        )
        if config.hidden_size % (4 * config.num_heads):
            raise StartupError("config.json: the vision tower's `hidden_size` must be a multiple of 4 * `num_heads`.")
        return config

    @property
    def patch_values(self) -> int:
        """Values of one patch of one frame."""
        return self.channels * self.patch_size * self.patch_size


def _deepstack_layers(vision: Mapping[str, Any]) -> tuple[int, ...]:
    layers = vision.get("deepstack_visual_indexes")
    depth = integer(vision, "depth")
    if not isinstance(layers, list) or not all(isinstance(layer, int) and 0 <= layer < depth for layer in layers):
        raise StartupError(
            f"config.json: `deepstack_visual_indexes` must list blocks of the vision tower (0 to {depth - 1}), "
            f"not {layers!r}; [] where there are none."
        )
    return tuple(layers)


@dataclass(frozen=True, slots=True)
class EncoderMetadata:
    """What follows from grids alone; made by `prepare` and handed to every block.

    *taps* int64 [P, 4] and *tap_weights* [P, 4] resample the learned positions; *turn* is that of `rotate_pairs`,
    complex64 [P, 1, D / 2].
    """

    layout: PackedLayout
    taps: torch.Tensor
    tap_weights: torch.Tensor
    turn: torch.Tensor
    backend: Backend


class VisionMlp(nn.Module):
    """Two biased linears around an activation."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.linear_fc1 = Linear(config.hidden_size, config.intermediate_size)
        self.linear_fc2 = Linear(config.intermediate_size, config.hidden_size)
        self.activation = ACTIVATIONS[config.activation]

    def add_to(self, residual_PE: torch.Tensor, x_PE: torch.Tensor) -> torch.Tensor:
        """Return *residual_PE* plus what came of *x_PE*."""
        return self.linear_fc2.add_to(residual_PE, self.linear_fc1(x_PE, self.activation))


class VisionBlock(nn.Module):
    """Attention and MLP, each on a normed input and added back."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm1 = LayerNorm(config.hidden_size, NORM_EPS)
        self.attn = PackedSelfAttention(config.hidden_size, config.num_heads)
        self.norm2 = LayerNorm(config.hidden_size, NORM_EPS)
        self.mlp = VisionMlp(config)

    def forward(self, x_PE: torch.Tensor, metadata: EncoderMetadata) -> torch.Tensor:
        """Map [P, E] to [P, E]."""
        backend = metadata.backend
        x_PE = self.attn.add_to(x_PE, self.norm1(x_PE, backend), metadata.turn, metadata.layout, backend)
        return self.mlp.add_to(x_PE, self.norm2(x_PE, backend))


class PatchMerger(nn.Module):
    """Concatenate each merge block and project it. The norm stands before the concatenation, or behind it."""

    def __init__(self, config: VisionConfig, norm_merged: bool) -> None:
        super().__init__()
        self.width = config.hidden_size * config.merge_size**2
        self.norm_merged = norm_merged
        self.norm = LayerNorm(self.width if norm_merged else config.hidden_size, NORM_EPS)
        self.linear_fc1 = Linear(self.width, self.width)
        self.linear_fc2 = Linear(self.width, config.out_hidden_size)

    def forward(self, x_PE: torch.Tensor, backend: Backend) -> torch.Tensor:
        """Map [P, E] to [U, X]."""
        x = x_PE.view(-1, self.width) if self.norm_merged else x_PE
        merged = self.norm(x, backend).view(-1, self.width)
        return self.linear_fc2(self.linear_fc1(merged, GELU))  # type: ignore[no-any-return]


class VisionTower(nn.Module):
    """Patches to features in the text network's space."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        kernel = (config.channels, config.temporal_patch_size, config.patch_size, config.patch_size)
        self.patch_embed = nn.ModuleDict({"proj": PatchEmbedding(config.hidden_size, kernel)})
        self.pos_embed = nn.Module()
        self.pos_embed.weight = nn.Parameter(torch.empty(config.side**2, config.hidden_size), requires_grad=False)
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.depth))
        self.merger = PatchMerger(config, norm_merged=False)
        self.deepstack_merger_list = nn.ModuleList(PatchMerger(config, True) for _ in config.deepstack_layers)

    def finish(self) -> None:
        """Make what is derived from loaded weights."""
        self.patch_embed["proj"].fold()  # type: ignore[operator]
        for block in self.blocks:
            block.attn.pair()  # type: ignore[union-attr,operator]
        # Resampling weighs four of them in float32.
        self.pos_embed.weight.data = self.pos_embed.weight.data.float()

    def prepare(self, grids: Sequence[Grid], backend: Backend) -> EncoderMetadata:
        """Return all that depends on *grids*, computed on the host and copied without waiting."""
        device = self.merger.linear_fc1.weight.device
        frames: list[FramePlaces] = []
        for grid in grids:
            frames += [frame_places(grid, self.config.merge_size, self.config.side)] * grid[0]
        host = (np.concatenate(arrays) for arrays in zip(*frames, strict=True))
        place_P2, taps_P4, weights_P4 = (torch.from_numpy(array).to(device, non_blocking=True) for array in host)
        frequencies = inverse_frequencies(ROPE_THETA, self.config.hidden_size // self.config.num_heads // 2, device)
        angles = (place_P2.unsqueeze(-1) * frequencies).flatten(1)
        return EncoderMetadata(packed_layout(grids, device), taps_P4, weights_P4, pair_rotation(angles), backend)

    def forward_blocks(
        self, patches_PC: torch.Tensor, metadata: EncoderMetadata
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run the tower over normalised patches; return the last block's output and those of the deepstack blocks."""
        learned_PE = functional.embedding_bag(
            metadata.taps,
            self.pos_embed.weight,  # type: ignore[arg-type]
            per_sample_weights=metadata.tap_weights,
            mode="sum",
        )
        x_PE = self.patch_embed["proj"](patches_PC)
        x_PE = x_PE + learned_PE.to(x_PE.dtype)
        tapped: dict[int, torch.Tensor] = {}
        for index, block in enumerate(self.blocks):
            x_PE = block(x_PE, metadata)
            if index in self.config.deepstack_layers:
                tapped[index] = x_PE
        return x_PE, [tapped[layer] for layer in self.config.deepstack_layers]

    def merge(self, x_PE: torch.Tensor, tapped: Sequence[torch.Tensor], backend: Backend) -> torch.Tensor:
        """Return [U, X * (1 + deepstack)]: the main features, then one slice per deepstack block."""
        deep = [merger(tap, backend) for merger, tap in zip(self.deepstack_merger_list, tapped, strict=True)]
        return torch.cat([self.merger(x_PE, backend), *deep], dim=-1)

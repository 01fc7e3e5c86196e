"""The vision tower, which maps patches to tokens in the text network's space.

Formulas: transformers 5.23, modeling_gemma4.py (Gemma4Vision*, Gemma4MultimodalEmbedder). Encoder contract: `prepare`
does everything that depends on grids, on the host; `forward` then runs without a device sync. Shapes: P patches in
merged blocks, C channels * height * width of a patch, V width of the tower, H heads, D head size, U tokens, E text
width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from saccade.models.gemma4.spec import GemmaVision
from saccade.models.gemma4.text import normed
from saccade.models.preprocessing.processor_config import CHANNELS
from saccade.models.spec import Grid
from saccade.nn.context import PackedLayout, VisionAttentionBackend
from saccade.nn.layers import FloatNorm, Layer, Linear
from saccade.nn.layerwise import Layerwise
from saccade.nn.ops import GELU_TANH, rotary
from saccade.nn.parallel import Ranks, Split
from saccade.nn.rope import cos_sin, inverse_frequencies
from saccade.nn.transfer import to_device
from saccade.nn.vision import IN_THE_ENCODER, frame_coordinates, packed_layout

BOUNDS = ("input_min", "input_max", "output_min", "output_max")


@dataclass(frozen=True, slots=True)
class TowerMetadata:
    """The metadata that depends only on grids. *places* int64 [P, 2] has the column and row of each patch."""

    layout: PackedLayout
    places: torch.Tensor
    backend: VisionAttentionBackend


class ClippedLinear(nn.Module):
    """A matrix whose input and output are clamped if the checkpoint has bounds for them."""

    input_min: torch.Tensor
    input_max: torch.Tensor
    output_min: torch.Tensor
    output_max: torch.Tensor

    def __init__(self, sizes: tuple[int, int], is_clipped: bool, split: Split, units: int, ranks: Ranks) -> None:
        super().__init__()
        self.linear = Linear(*sizes, bias=False, split=split, units=(units,), ranks=ranks)
        self.is_clipped = is_clipped
        for name in BOUNDS if is_clipped else ():
            self.register_parameter(name, nn.Parameter(torch.empty(()), requires_grad=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [P, inputs] to [P, outputs]."""
        if not self.is_clipped:
            return self.linear(x)  # type: ignore[no-any-return]
        return self.linear(x.clamp(self.input_min, self.input_max)).clamp(self.output_min, self.output_max)  # type: ignore[no-any-return]


class TowerAttention(Layer):
    """Bidirectional attention within each image or frame; half of each head is rotated by columns, half by rows."""

    def __init__(self, config: GemmaVision, ranks: Ranks) -> None:
        super().__init__()
        size, heads, self.head_dim = config.hidden_size, config.num_heads, config.head_dim
        ranks.divide(heads, IN_THE_ENCODER)
        width = heads * config.head_dim
        self.q_proj = ClippedLinear((size, width), config.clipped, "outputs", heads, ranks)
        self.k_proj = ClippedLinear((size, width), config.clipped, "outputs", heads, ranks)
        self.v_proj = ClippedLinear((size, width), config.clipped, "outputs", heads, ranks)
        self.o_proj = ClippedLinear((width, size), config.clipped, "inputs", heads, ranks)
        self.q_norm = FloatNorm(config.head_dim, config.norm_eps)
        self.k_norm = FloatNorm(config.head_dim, config.norm_eps)

    def forward(
        self, x_PV: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], metadata: TowerMetadata
    ) -> torch.Tensor:
        """Map [P, V] to [P, V]."""
        shape = (len(x_PV), -1, self.head_dim)
        q_PHD, k_PHD = (
            rotary(norm(proj(x_PV).view(shape)).unflatten(2, (2, -1)), rotation).flatten(2)
            for proj, norm in ((self.q_proj, self.q_norm), (self.k_proj, self.k_norm))
        )
        v_PHD = normed(self.v_proj(x_PV).view(shape), self.q_norm.eps)
        attended = metadata.backend.packed((q_PHD, k_PHD, v_PHD), metadata.layout, 1.0)
        return self.o_proj(attended)  # type: ignore[no-any-return]


class TowerMlp(nn.Module):
    """Computes down(gelu(gate(x)) * up(x))."""

    def __init__(self, config: GemmaVision, ranks: Ranks) -> None:
        super().__init__()
        outward = (config.hidden_size, config.intermediate_size)
        self.gate_proj = ClippedLinear(outward, config.clipped, "outputs", ranks.size, ranks)
        self.up_proj = ClippedLinear(outward, config.clipped, "outputs", ranks.size, ranks)
        self.down_proj = ClippedLinear(outward[::-1], config.clipped, "inputs", ranks.size, ranks)

    def forward(self, x_PV: torch.Tensor) -> torch.Tensor:
        """Map [P, V] to [P, V]."""
        return self.down_proj(GELU_TANH(self.gate_proj(x_PV)) * self.up_proj(x_PV))  # type: ignore[no-any-return]


class TowerBlock(nn.Module):
    """Attention, then the MLP. Each reads a normalised input and adds its normalised result to the residual."""

    def __init__(self, config: GemmaVision, ranks: Ranks) -> None:
        super().__init__()
        self.self_attn = TowerAttention(config, ranks)
        self.mlp = TowerMlp(config, ranks)
        size, eps = config.hidden_size, config.norm_eps
        self.input_layernorm = FloatNorm(size, eps)
        self.post_attention_layernorm = FloatNorm(size, eps)
        self.pre_feedforward_layernorm = FloatNorm(size, eps)
        self.post_feedforward_layernorm = FloatNorm(size, eps)

    def forward(
        self, x_PV: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], metadata: TowerMetadata
    ) -> torch.Tensor:
        """Map [P, V] to [P, V]."""
        x_PV = x_PV + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x_PV), rotation, metadata))
        return x_PV + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x_PV)))  # type: ignore[no-any-return]


class PatchEmbedder(nn.Module):
    """The embedded patches, plus learned positions for columns and rows.

    The checkpoint's matrix reads a patch pixel by pixel; the wire sends it channel by channel.
    """

    def __init__(self, config: GemmaVision) -> None:
        super().__init__()
        self.patch_size = config.patch_size
        self.input_proj = Linear(CHANNELS * config.patch_size**2, config.hidden_size, bias=False)
        self.input_proj.is_as_stored = False
        table = torch.empty(2, config.table_size, config.hidden_size)
        self.position_embedding_table = nn.Parameter(table, requires_grad=False)

    def finish(self) -> None:
        """Reorder the loaded matrix for the wire's patches."""
        self.input_proj.make_plain()
        pixels = self.input_proj.weight.unflatten(1, (self.patch_size, self.patch_size, CHANNELS))
        self.input_proj.weight = nn.Parameter(pixels.permute(0, 3, 1, 2).flatten(1), requires_grad=False)

    def forward(self, patches_PC: torch.Tensor, places_P2: torch.Tensor) -> torch.Tensor:
        """Map normalised patches to [P, V]."""
        columns, rows = self.position_embedding_table
        positions_PV = columns.index_select(0, places_P2[:, 0]) + rows.index_select(0, places_P2[:, 1])
        return self.input_proj(patches_PC) + positions_PV  # type: ignore[no-any-return]


class GemmaTower(nn.Module):
    """The blocks, then the mean of each merged square of patches, in some models with a bias and a scale.

    After a norm, a matrix maps the means to the text network's width.
    """

    std_bias: torch.Tensor
    std_scale: torch.Tensor

    def __init__(self, config: GemmaVision, ranks: Ranks) -> None:
        super().__init__()
        self.config = config
        self.patch_embedder = PatchEmbedder(config)
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList(TowerBlock(config, ranks) for _ in range(config.depth))
        for name in ("std_bias", "std_scale") if config.standardised else ():
            self.register_parameter(name, nn.Parameter(torch.empty(config.hidden_size), requires_grad=False))
        self.embedding_projection = Linear(config.hidden_size, config.out_hidden_size, bias=False)
        self.frequencies = torch.empty(0)

    def finish(self) -> None:
        """Compute the rotary frequencies, on the loaded weights' device."""
        device = self.patch_embedder.position_embedding_table.device
        self.frequencies = inverse_frequencies(self.config.theta, self.config.head_dim // 2, device)

    def prepare(self, grids: Sequence[Grid], backend: VisionAttentionBackend) -> TowerMetadata:
        """Return the metadata of concatenated images, computed on the host and copied without a device sync."""
        device = self.frequencies.device
        places_P2 = table_places(grids, self.config.merge_size, self.config.table_size, device)
        return TowerMetadata(packed_layout(grids, device, backend), places_P2, backend)

    def forward(self, patches_PC: torch.Tensor, metadata: TowerMetadata) -> Layerwise:
        """Map normalised patches to features [U, E]."""
        x_PV = self.patch_embedder(patches_PC, metadata.places)
        angles = (metadata.places.unsqueeze(-1) * self.frequencies).flatten(0, 1)
        cos, sin = (part.view(len(x_PV), 1, 2, -1) for part in cos_sin(angles, x_PV.dtype))
        for block in self.encoder.layers:  # type: ignore[union-attr]
            x_PV = block(x_PV, (cos, sin), metadata)
            yield
        pooled_UV = x_PV.float().unflatten(0, (-1, self.config.merge_size**2)).mean(1).to(x_PV.dtype)
        tokens_UV = pooled_UV.float() * self.config.hidden_size**0.5
        if self.config.standardised:
            tokens_UV = (tokens_UV - self.std_bias.float()) * self.std_scale.float()
        return self.embedding_projection(normed(tokens_UV.to(x_PV.dtype), self.config.norm_eps))  # type: ignore[no-any-return]


def table_places(grids: Sequence[Grid], merge: int, table_size: int, device: torch.device) -> torch.Tensor:
    """Return the column and row, int64 [P, 2], of every patch of all images, as indices into a position table."""
    frames = [(frame_coordinates(grid, merge), grid[0]) for grid in grids]
    places = np.concatenate([np.tile(places[:, ::-1], (count, 1)) for places, count in frames])
    # Only images that fill up a graph are wider than the table.
    return to_device(places.clip(max=table_size - 1).astype(np.int64), device)

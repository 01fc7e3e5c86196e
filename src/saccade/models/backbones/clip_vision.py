"""CLIP's vision tower: maps square images to a block's hidden states (Radford et al. 2021, arXiv:2103.00020).

Formulas: transformers, modeling_clip.py (CLIPVision*). Parameters have the releases' names, including their spelling
`pre_layrnorm`. Encoder contract: `prepare` runs on the host; `forward` then runs without a device sync. Shapes: V
images of one size, S pixels per side, P patches of all images, C values per patch, T tokens of all images (each image
has a class token before its patches), H heads, D head size, E hidden size.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from saccade.models.backbones.clip_config import ClipConfig
from saccade.models.backbones.decoder import Norm
from saccade.models.backbones.names import target_of
from saccade.models.backbones.vision_mlp import VisionMlp
from saccade.models.network import Target
from saccade.models.preprocessing.processor_config import CHANNELS
from saccade.nn.context import PackedLayout, VisionAttentionBackend
from saccade.nn.layers import LayerNorm, Linear
from saccade.nn.layerwise import Layerwise
from saccade.nn.ops import GELU, Activation
from saccade.nn.parallel import ALONE, Ranks
from saccade.nn.vision import IN_THE_ENCODER, PatchEmbedding, packed_sequences


@dataclass(frozen=True, slots=True)
class ViewMetadata:
    """The metadata for a batch of images."""

    layout: PackedLayout
    backend: VisionAttentionBackend

    @property
    def num_views(self) -> int:
        """The number of images."""
        return len(self.layout.sequence_lengths)


class ClipAttention(nn.Module):
    """Bidirectional attention within each image, without rotary positions."""

    def __init__(self, hidden_size: int, num_heads: int, ranks: Ranks, qkv_bias: bool = True) -> None:
        super().__init__()
        self.num_heads = ranks.divide(num_heads, IN_THE_ENCODER)
        widths, units = (hidden_size,) * 3, (num_heads,) * 3
        self.qkv_proj = Linear(hidden_size, widths, qkv_bias, split="outputs", units=units, ranks=ranks)
        self.out_proj = Linear(hidden_size, hidden_size, split="inputs", ranks=ranks)

    def add_to(self, residual_TE: torch.Tensor, x_TE: torch.Tensor, metadata: ViewMetadata) -> torch.Tensor:
        """Attend over *x_TE*, and return the residual plus the result."""
        qkv_THD = self.qkv_proj(x_TE).view(x_TE.shape[0], 3 * self.num_heads, -1)
        q_THD, k_THD, v_THD = qkv_THD.chunk(3, dim=1)
        return self.out_proj.add_to(residual_TE, metadata.backend.packed((q_THD, k_THD, v_THD), metadata.layout))


class ClipBlock(nn.Module):
    """Attention, then the MLP. Each reads a normalised input and adds its result to the residual."""

    def __init__(self, config: ClipConfig, ranks: Ranks, norm: Norm = LayerNorm) -> None:
        super().__init__()
        self.layer_norm1 = norm(config.hidden_size, config.norm_eps)
        self.self_attn = ClipAttention(config.hidden_size, config.num_heads, ranks)
        self.layer_norm2 = norm(config.hidden_size, config.norm_eps)
        self.mlp = VisionMlp(config, ranks)

    def forward(self, x_TE: torch.Tensor, metadata: ViewMetadata) -> torch.Tensor:
        """Map [T, E] to [T, E]."""
        x_TE = self.self_attn.add_to(x_TE, self.layer_norm1(x_TE), metadata)
        return self.mlp.add_to(x_TE, self.layer_norm2(x_TE))


class ClipEmbeddings(nn.Module):
    """Each image's class token and embedded patches, plus learned positions.

    With *bias*, the patch embedding has a bias. With *has_ones*, the checkpoint's class token and position table have
    extra leading dimensions of 1.
    """

    def __init__(self, config: ClipConfig, *, bias: bool = False, has_ones: bool = False) -> None:
        super().__init__()
        self.num_patches, width = config.num_patches, config.hidden_size
        kernel = (CHANNELS, config.patch_size, config.patch_size)
        token_E = torch.empty((1, 1, width) if has_ones else width)
        table_PE = torch.empty(*(1,) * has_ones, 1 + self.num_patches, width)
        self.class_embedding = nn.Parameter(token_E, requires_grad=False)
        self.patch_embedding = PatchEmbedding(width, kernel, bias)
        self.position_embedding = nn.Module()
        self.position_embedding.weight = nn.Parameter(table_PE, requires_grad=False)

    def forward(self, patches_PC: torch.Tensor) -> torch.Tensor:
        """Map the patches of all images to [T, E]."""
        patches_VPE = self.patch_embedding(patches_PC).unflatten(0, (-1, self.num_patches))
        class_V1E = self.class_embedding.expand(len(patches_VPE), 1, -1)
        positions_TE: torch.Tensor = self.position_embedding.weight  # type: ignore[assignment]
        return (torch.cat((class_V1E, patches_VPE), 1) + positions_TE).flatten(0, 1)


class ViewTower(nn.Module):
    """A tower for square images: *embeddings* turns each into *view_length* vectors, which *blocks* then process."""

    def __init__(self, embeddings: nn.Module, blocks: Iterable[nn.Module], view_length: int) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.layers = nn.ModuleList(blocks)
        self.view_length = view_length

    def prepare(self, num_views: int, backend: VisionAttentionBackend) -> ViewMetadata:
        """Return the metadata of *num_views* images, computed on the host and copied without a device sync."""
        device = next(self.embeddings.parameters()).device
        return ViewMetadata(packed_sequences((self.view_length,) * num_views, device, backend), backend)

    def embed(self, patches_PC: torch.Tensor) -> torch.Tensor:
        """Map normalised patches to [T, E]."""
        return self.embeddings(patches_PC)  # type: ignore[no-any-return]

    def forward(self, patches_PC: torch.Tensor, metadata: ViewMetadata) -> Layerwise:
        """Map normalised patches, as `view_patches` lays them out, to hidden states [V, view_length, E]."""
        x_TE = self.embed(patches_PC)
        for block in self.layers:
            x_TE = block(x_TE, metadata)
            yield
        return x_TE.unflatten(0, (metadata.num_views, -1))  # type: ignore[no-any-return]


class ClipTower(ViewTower):
    """The embeddings and the first *num_blocks* blocks, without the norm that CLIP has after its last block."""

    def __init__(self, config: ClipConfig, num_blocks: int, ranks: Ranks = ALONE) -> None:
        blocks = (ClipBlock(config, ranks) for _ in range(num_blocks))
        super().__init__(ClipEmbeddings(config), blocks, 1 + config.num_patches)
        self.config = config
        self.pre_layrnorm = LayerNorm(config.hidden_size, config.norm_eps)

    def embed(self, patches_PC: torch.Tensor) -> torch.Tensor:
        return self.pre_layrnorm(self.embeddings(patches_PC))  # type: ignore[no-any-return]

    def locate(self, name: str) -> Target | None:
        """Return the parameter that the tensor *name*, relative to the tower, fills; None if the network does not need
        it.

        It needs neither the blocks after the chosen hidden states, nor the norm after the last block, nor the position
        ids in old releases.
        """
        name = name.removeprefix("vision_model.")
        if name.startswith("post_layernorm.") or name == "embeddings.position_ids":
            return None
        block = name.removeprefix("encoder.layers.").partition(".")[0]
        if block.isdecimal() and len(self.layers) <= int(block) < self.config.depth:
            return None
        return target_of(name, (("encoder.", ""),))


class MlpProjector(nn.Module):
    """Two linear layers that map a tower's features to the text network's *width*."""

    def __init__(self, inputs: int, width: int, activation: Activation = GELU, bias: bool = True) -> None:
        super().__init__()
        self.linear_1 = Linear(inputs, width, bias)
        self.linear_2 = Linear(width, width, bias)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [U, inputs] to [U, width]."""
        return self.linear_2(self.linear_1(x, self.activation))  # type: ignore[no-any-return]


def joined_squares(x_VPC: torch.Tensor, scale: int) -> torch.Tensor:
    """Join the channels of each *scale* x *scale* block of patches in square views, row by row: [U, C * scale^2]."""
    side = round(x_VPC.shape[1] ** 0.5)
    blocks: torch.Tensor = x_VPC.unflatten(1, (side // scale, scale, side // scale, scale))
    return blocks.transpose(2, 3).flatten(3).flatten(0, 2)


def view_patches(views_V3SS: torch.Tensor, patch_size: int) -> torch.Tensor:
    """Return the images' patches [P, 3 * patch_size^2], row by row. Drops edge pixels that do not fill a patch."""
    patches = views_V3SS.unfold(2, patch_size, patch_size).unfold(3, patch_size, patch_size)
    return patches.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(0, 2)

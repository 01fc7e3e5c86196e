"""Phi-3-vision's network: the vision tower, HD transform, projector and text decoder.

Sources: the release's image_processing_phi3_v.py and image_embedding_phi3_v.py. Shapes: N tokens, B bytes of pixels, V
views (a global view and crops of each image), S side of a view in pixels, C channels of the vision tower, E hidden
size, R rows to predict from, U image tokens in the step, W = E.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from saccade.models.backbones.clip_vision import ClipTower, MlpProjector, ViewMetadata, view_patches
from saccade.models.backbones.grouped_query_text import GroupedQueryDecoder
from saccade.models.backbones.image_text_network import ImageTextNetwork
from saccade.models.network import Target
from saccade.models.phi3_v.hd_order import feature_order
from saccade.models.phi3_v.layout import CROP, PATCH, TOKENS_PER_SIDE, Layout
from saccade.models.phi3_v.spec import Spec, crops
from saccade.models.phi3_v.weights import target
from saccade.models.preprocessing.processor_config import CHANNELS
from saccade.models.spec import MediaShape
from saccade.nn.context import VisionAttentionBackend
from saccade.nn.layerwise import Layerwise
from saccade.nn.parallel import Ranks
from saccade.nn.transfer import to_device


@dataclass(frozen=True, slots=True)
class Phi3Metadata:
    """The metadata of *images*, given as (rows, columns) of crops. *order* int64 [U] selects each token's feature."""

    images: tuple[tuple[int, int], ...]
    views: ViewMetadata
    order: torch.Tensor


class Network(ImageTextNetwork):
    """The family's network in the engine. Parameters are empty until the loader has filled them and called `finish`."""

    layout = Layout
    decoder = GroupedQueryDecoder

    def build(self, spec: Spec, ranks: Ranks) -> None:
        """Create the parts for images."""
        merged = 4 * spec.vision.hidden_size
        self.vision_tower = ClipTower(spec.vision, spec.num_blocks, ranks.encoder)
        self.newline = nn.Parameter(torch.empty(1, 1, 1, merged), requires_grad=False)
        self.separator = nn.Parameter(torch.empty(1, 1, merged), requires_grad=False)
        self.projector = MlpProjector(merged, spec.text.hidden_size)

    def target(self, name: str) -> Target | None:
        """Return the parameter for the release's tensor *name*; None if the network does not need it."""
        return target(name, self.vision_tower.locate)

    def prepare(self, items: Sequence[MediaShape], backend: VisionAttentionBackend) -> Phi3Metadata:
        """Return the metadata of *items* for `encode`."""
        images = tuple(crops(item.grid) for item in items)
        views = self.vision_tower.prepare(sum(1 + rows * columns for rows, columns in images), backend)
        return Phi3Metadata(images, views, to_device(feature_order(images), self.device))

    def encode(self, pixels_B: torch.Tensor, metadata: Phi3Metadata) -> Layerwise:
        """Map uint8 padded images to features [U, E], image after image."""
        sizes = [rows * columns * CHANNELS * CROP**2 for rows, columns in metadata.images]
        padded = zip(pixels_B.split_with_sizes(sizes), metadata.images, strict=True)
        views_V3SS = torch.cat([self._views(pixels, *image) for pixels, image in padded])
        # The tower's first hidden state of a view is that of the class token.
        hidden_VPC = (yield from self.vision_tower(view_patches(views_V3SS, PATCH), metadata.views))[:, 1:]
        table = torch.cat((self.newline.flatten(0, 2), self.separator.flatten(0, 1), _merged(hidden_VPC)))
        return self.projector(table.index_select(0, metadata.order))  # type: ignore[no-any-return]

    def _views(self, pixels: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """Return the global view and the crops of one padded image, [1 + rows * columns, 3, S, S]."""
        # As in the release, the global view is resized after normalisation, in float32 and without antialiasing.
        image = self.normalised(pixels.view(1, -1), torch.float32)
        image_3HW = image.view(CHANNELS, rows * CROP, columns * CROP)
        overview = functional.interpolate(image_3HW.unsqueeze(0), size=(CROP, CROP), mode="bicubic")
        details = image_3HW.view(CHANNELS, rows, CROP, columns, CROP).permute(1, 3, 0, 2, 4).flatten(0, 1)
        return torch.cat((overview, details)).to(self.dtype)


def _merged(hidden_VPC: torch.Tensor) -> torch.Tensor:
    """Return the features of all views by rows [V * 144, 4C]. Each feature concatenates 2 x 2 patches."""
    side = TOKENS_PER_SIDE
    blocks: torch.Tensor = hidden_VPC.unflatten(1, (side, 2, side, 2))
    return blocks.permute(0, 1, 3, 2, 4, 5).reshape(-1, 4 * hidden_VPC.shape[-1])

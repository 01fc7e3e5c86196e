"""A tower for square views and a text decoder as one network.

Families differ in the tower, projector and tensor names. Shapes: B bytes of pixels, U image tokens in the step, E
hidden size.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from saccade.models.backbones.clip_vision import ViewMetadata, view_patches
from saccade.models.backbones.grouped_query_text import GroupedQueryDecoder
from saccade.models.backbones.image_text_network import ImageTextNetwork
from saccade.models.preprocessing.processor_config import CHANNELS
from saccade.models.spec import MediaShape
from saccade.nn.context import VisionAttentionBackend
from saccade.nn.layerwise import Layerwise
from saccade.nn.parallel import Ranks
from saccade.nn.vision import grid_list


class TiledNetwork(ImageTextNetwork):
    """Implements models.network.Network for a TiledSpec.

    It builds *tower* from the spec's `vision` and the encoder's ranks, and *projection* from the spec. The projection
    maps the tower's hidden states to features.
    """

    decoder: ClassVar[Callable[..., Any]] = GroupedQueryDecoder
    tower: ClassVar[type[Any]]
    projection: ClassVar[type[Any]]

    def build(self, spec: Any, ranks: Ranks) -> None:
        """Create the parts for images."""
        self.vision_tower = self.tower(spec.vision, ranks.encoder)
        self.projector = self.projection(spec)

    def prepare(self, items: Sequence[MediaShape], backend: VisionAttentionBackend) -> ViewMetadata:
        """Return the metadata of *items* for `encode`."""
        grids = grid_list(item.grid for item in items)
        return self.vision_tower.prepare(sum(map(self.spec.num_views, grids)), backend)  # type: ignore[no-any-return]

    def encode(self, pixels_B: torch.Tensor, metadata: ViewMetadata) -> Layerwise:
        """Map uint8 views to features [U, E], item after item."""
        vision = self.spec.vision
        views_V3SS = pixels_B.view(-1, CHANNELS, vision.image_size, vision.image_size)
        patches_TD = self.normalised(view_patches(views_V3SS, vision.patch_size), self.dtype)
        return self.projector((yield from self.vision_tower(patches_TD, metadata)))  # type: ignore[no-any-return]

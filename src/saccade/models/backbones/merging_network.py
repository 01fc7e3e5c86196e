"""A merging tower and a text decoder as one network; families differ in the tower, the decoder and in names.

Shapes: B bytes of pixels, U tokens of images in the step, W = E * number of features of a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from saccade.models.backbones.grouped_query_text import GroupedQueryDecoder
from saccade.models.backbones.image_text_network import ImageTextNetwork
from saccade.models.backbones.merging_tower import MergingTower
from saccade.models.spec import VIDEO, MediaShape
from saccade.nn.context import VisionAttentionBackend
from saccade.nn.parallel import Ranks
from saccade.nn.vision import grid_list


@dataclass(frozen=True, slots=True)
class VideoMetadata:
    """The *tower*'s metadata for videos, whose patches have the pixels of all frames of a group."""

    tower: Any


class MergingNetwork(ImageTextNetwork):
    """models.network.Network. *tower* is made from the spec's vision and the encoder's ranks."""

    decoder: ClassVar[type[Any]] = GroupedQueryDecoder
    tower: ClassVar[type[MergingTower]]

    def build(self, spec: Any, ranks: Ranks) -> None:
        """Create the parts for images."""
        self.visual = self.tower(spec.vision, ranks.encoder)

    def prepare(self, items: Sequence[MediaShape], backend: VisionAttentionBackend) -> tuple[Any, list[int]]:
        """Return the metadata of *items*, all of one modality, for `encode`, and each item's token count."""
        grids = grid_list(item.grid for item in items)
        metadata = self.visual.prepare(grids, backend)
        counts = [self.spec.item_tokens(grid) for grid in grids]
        return VideoMetadata(metadata) if items[0].modality == VIDEO else metadata, counts

    def encode(self, pixels_B: torch.Tensor, metadata: Any) -> torch.Tensor:
        """Map uint8 patches to features [U, W], item after item."""
        num_values = self.spec.vision.patch_values
        if isinstance(metadata, VideoMetadata):
            metadata, num_values = metadata.tower, num_values * self.spec.vision.temporal_patch_size
        return self.visual(self.normalised(pixels_B.view(-1, num_values), self.dtype), metadata)  # type: ignore[no-any-return]

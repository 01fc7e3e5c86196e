"""A merging tower and a text decoder as one network. Families differ in the tower, decoder and tensor names.

Shapes: B bytes of pixels, U image tokens in the step, W hidden size * features per token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from saccade.models.backbones.grouped_query_text import GroupedQueryDecoder
from saccade.models.backbones.image_text_network import ImageTextNetwork
from saccade.models.spec import IMAGE, VIDEO, MediaShape
from saccade.nn.context import VisionAttentionBackend
from saccade.nn.layerwise import Layerwise
from saccade.nn.parallel import Ranks
from saccade.nn.vision import grid_list


@dataclass(frozen=True, slots=True)
class VideoMetadata:
    """The *tower*'s metadata for videos, whose patches hold the pixels of every frame in a group."""

    tower: Any


class MergingNetwork(ImageTextNetwork):
    """Implements models.network.Network. It builds *tower* from the spec's `vision` and the encoder's ranks."""

    decoder: ClassVar[Callable[..., Any]] = GroupedQueryDecoder
    tower: ClassVar[type[Any]]

    def build(self, spec: Any, ranks: Ranks) -> None:
        """Create the parts for images."""
        self.visual = self.tower(spec.vision, ranks.encoder)

    def prepare(self, items: Sequence[MediaShape], backend: VisionAttentionBackend) -> Any:
        """Return the metadata of *items*, all of one modality, for `encode`."""
        metadata = self.visual.prepare(grid_list(item.grid for item in items), backend)
        return VideoMetadata(metadata) if items[0].modality == VIDEO else metadata

    def encode(self, pixels_B: torch.Tensor, metadata: Any) -> Layerwise:
        """Map uint8 patches to features [U, W], item after item."""
        modality = IMAGE
        if isinstance(metadata, VideoMetadata):
            metadata, modality = metadata.tower, VIDEO
        patches = pixels_B.view(-1, self.spec.patch_values(modality))
        return (yield from self.visual(self.normalised(patches, self.dtype), metadata))  # type: ignore[no-any-return]

"""LLaVA's network: the vision tower, projector and text decoder.

Formulas: transformers, modeling_llava.py and modeling_llava_next.py. Shapes: N tokens, B bytes of pixels, V square
views of all images, F features of all views, E hidden size, R rows to predict from, U image tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from saccade.models.backbones.clip_vision import ClipTower, MlpProjector, ViewMetadata, view_patches
from saccade.models.backbones.grouped_query_text import GroupedQueryDecoder
from saccade.models.backbones.image_text_network import ImageTextNetwork
from saccade.models.llava import tiles
from saccade.models.llava.layout import Layout
from saccade.models.llava.spec import Spec
from saccade.models.llava.weights import target
from saccade.models.network import Target
from saccade.models.preprocessing.processor_config import CHANNELS
from saccade.models.spec import MediaShape
from saccade.nn.context import VisionAttentionBackend
from saccade.nn.layerwise import Layerwise
from saccade.nn.ops import ACTIVATIONS
from saccade.nn.parallel import Ranks
from saccade.nn.transfer import to_device
from saccade.nn.vision import grid_list


@dataclass(frozen=True, slots=True)
class LlavaMetadata:
    """The metadata that depends only on shapes.

    *order* int64 [U] selects features: 0 is the newline, and the features of all views count from 1. It is None if an
    image's features are just those of its view.
    """

    views: ViewMetadata
    order: torch.Tensor | None


class Network(ImageTextNetwork):
    """The family's network in the engine. Parameters are empty until the loader has filled them and called `finish`."""

    layout = Layout
    decoder = GroupedQueryDecoder

    def build(self, spec: Spec, ranks: Ranks) -> None:
        """Create the parts for images."""
        self.vision_tower = ClipTower(spec.vision, spec.num_vision_blocks, ranks.encoder)
        activation, width = ACTIVATIONS[spec.projector_activation], spec.text.hidden_size
        projector = MlpProjector(spec.vision.hidden_size, width, activation, spec.has_projector_bias)
        self.multi_modal_projector = projector
        newline_E = nn.Parameter(torch.empty(width), requires_grad=False)
        self.image_newline = newline_E if spec.has_tiles else None

    def target(self, name: str) -> Target | None:
        """Return the parameter for the release's tensor *name*; None if the network does not need it."""
        return target(name, self.vision_tower)

    def prepare(self, items: Sequence[MediaShape], backend: VisionAttentionBackend) -> LlavaMetadata:
        """Return the metadata of *items* for `encode`."""
        grids = grid_list(item.grid for item in items)
        shapes = [MediaShape(grid, item.original_size) for grid, item in zip(grids, items, strict=True)]
        views = self.vision_tower.prepare(sum(map(self.spec.num_views, grids)), backend)
        return LlavaMetadata(views, self._order(shapes) if self.spec.has_tiles else None)

    def _order(self, shapes: Sequence[MediaShape]) -> torch.Tensor:
        """Return LlavaMetadata.order, copied to the device without a sync."""
        vision, orders, start = self.spec.vision, [], 1
        for shape in shapes:
            _, rows, columns = shape.grid
            size = self.spec.unpadded_size(shape.grid, shape.original_size)
            order = tiles.feature_order(rows, columns, size, vision.side)
            orders.append(np.where(order == tiles.NEWLINE, 0, order + start))
            start += self.spec.num_views(shape.grid) * vision.num_patches
        return to_device(np.concatenate(orders), self.device)

    def encode(self, pixels_B: torch.Tensor, metadata: LlavaMetadata) -> Layerwise:
        """Map uint8 views to features [U, E], image after image."""
        vision = self.spec.vision
        views = pixels_B.view(-1, CHANNELS, vision.image_size, vision.image_size)
        patches = self.normalised(view_patches(views, vision.patch_size), self.dtype)
        hidden = yield from self.vision_tower(patches, metadata.views)
        patches = hidden if self.spec.has_class_token else hidden[:, 1:]
        features_FE = self.multi_modal_projector(patches.flatten(0, 1))
        if self.image_newline is None or metadata.order is None:
            return features_FE  # type: ignore[no-any-return]
        return torch.cat((self.image_newline.unsqueeze(0), features_FE)).index_select(0, metadata.order)

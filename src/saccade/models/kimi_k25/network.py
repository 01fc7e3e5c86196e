"""Vision tower, projector and text decoder.

Shapes: N tokens, B bytes of pixels, P patches, I values of a patch, E hidden size, R rows to predict from,
V vocabulary, U tokens of images in the step.
"""

from collections.abc import Sequence

import torch

from saccade.models.backbones.deepseek_text import DeepseekTextDecoder
from saccade.models.backbones.image_text_network import ImageTextNetwork
from saccade.models.backbones.moonvit import MoonVitMetadata, MoonVitProjector, MoonVitTower
from saccade.models.kimi_k25.layout import Layout
from saccade.models.kimi_k25.spec import Spec
from saccade.models.kimi_k25.weights import target
from saccade.models.network import Target
from saccade.models.preprocessing.processor_config import CHANNELS
from saccade.models.spec import MediaShape
from saccade.nn.context import VisionAttentionBackend
from saccade.nn.parallel import Ranks


class Network(ImageTextNetwork):
    """The engine's network of the family. Parameters are empty until the loader has filled them and called `finish`."""

    layout = Layout
    decoder = DeepseekTextDecoder

    def build(self, spec: Spec, ranks: Ranks) -> None:
        """Create the parts for images."""
        self.patch_values = CHANNELS * spec.vision.patch_size**2
        self.vision_tower = MoonVitTower(spec.vision, ranks.encoder)
        self.mm_projector = MoonVitProjector(spec.vision)

    def target(self, name: str) -> Target | None:
        """Return the place of the release's tensor *name*."""
        return target(name, self.spec.text)

    def prepare(
        self, items: Sequence[MediaShape], backend: VisionAttentionBackend
    ) -> tuple[MoonVitMetadata, list[int]]:
        """Return the metadata of *items* for `encode`, and each item's token count."""
        grids = [item.grid for item in items]
        return self.vision_tower.prepare(grids, backend), [self.spec.item_tokens(grid) for grid in grids]

    def encode(self, pixels_B: torch.Tensor, metadata: MoonVitMetadata) -> torch.Tensor:
        """Map uint8 patches in raster order, frame after frame, to features [U, E], item after item."""
        pixels_PI = pixels_B.view(-1, self.patch_values).index_select(0, metadata.order)
        mean, std = self.scaled_mean_std
        patches_PI = self.ops.normalise_pixels(pixels_PI, mean, std, self.dtype)
        return self.mm_projector(self.vision_tower(patches_PI, metadata))  # type: ignore[no-any-return]

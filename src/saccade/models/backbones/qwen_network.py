"""A vision tower, its projector and Qwen's text decoder as one network; families differ in the tower and in names.

Shapes: N tokens, B bytes of pixels, P patches, C values of a patch, E hidden size, R rows to predict from,
V vocabulary, U tokens of images in the step, W = E * number of features of a token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from saccade.errors import StartupError
from saccade.models.backbones import image_text_network
from saccade.models.backbones.model_config import ties_embeddings
from saccade.models.backbones.qwen_config import TowerConfig
from saccade.models.backbones.qwen_spec import QwenSpec
from saccade.models.backbones.qwen_text import QwenTextDecoder
from saccade.models.preprocessing.processor_config import CHANNELS
from saccade.models.preprocessing.smart_resize import SmartResizeLayout
from saccade.models.spec import VIDEO, Grid, MediaShape
from saccade.nn.context import ForwardContext, VisionAttentionBackend
from saccade.nn.parallel import ALONE, Ranks
from saccade.nn.vision import grid_list


@dataclass(frozen=True, slots=True)
class VideoMetadata:
    """The *tower*'s metadata for videos, whose patches have the pixels of all frames of a group."""

    tower: Any


class QwenTower(Protocol):
    """A vision tower and its projector, a torch module."""

    def finish(self) -> None:
        """Compute the values derived from the loaded weights."""

    def prepare(self, grids: Sequence[Grid], backend: VisionAttentionBackend) -> Any:
        """Return the metadata of *grids*, computed on the host and copied without a device sync."""

    def __call__(self, patches_PC: torch.Tensor, metadata: Any) -> torch.Tensor:
        """Map normalised patches [P, C] to features [U, W], without a device sync."""


class QwenDecoder(image_text_network.Decoder, Protocol):
    """A text decoder, a torch module."""

    def __call__(self, x_NE: torch.Tensor, context: ForwardContext, *added: Any) -> torch.Tensor:
        """Return normalised hidden states [N, E]. *added* are the rows and features of deepstack, if there are any."""


class QwenNetwork(image_text_network.ImageTextNetwork):
    """models.network.Network, except for `locate`. Parameters are empty until the loader has filled them.

    A family names the classes of its parts: *tower* is made from the spec's vision and the encoder's ranks, *decoder*
    from the spec's text and the ranks.
    """

    visual: QwenTower
    language_model: QwenDecoder
    layout: ClassVar[type[SmartResizeLayout]]
    tower: ClassVar[type[Any]]
    decoder: ClassVar[type[Any]] = QwenTextDecoder

    def __init__(
        self, spec: QwenSpec[Any], config: Mapping[str, Any], preprocessor: Mapping[str, Any], ranks: Ranks = ALONE
    ) -> None:
        settings = self.layout(config, preprocessor).settings
        decoder, tied = self.decoder(spec.text, ranks), ties_embeddings(config)
        super().__init__(decoder, settings, spec.text, tied=tied, ranks=ranks)
        self.spec = spec
        self.visual = self.tower(spec.vision, ranks.encoder)
        _check_channels(spec.vision)

    def finish(self) -> None:
        """Compute the values derived from loaded weights and their device. Call once, after loading."""
        self.visual.finish()
        super().finish()

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
        return self.visual(self.normalised(pixels_B.view(-1, num_values), self.dtype), metadata)

    def forward(
        self,
        input_ids: torch.Tensor,
        context: ForwardContext,
        media_rows: torch.Tensor | None = None,
        media_UW: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return hidden states [N, E] for ids int64 [N]; media_UW replaces the embeddings at *media_rows* int64 [U]."""
        x_NE = self.language_model.embed(input_ids)
        if media_rows is None or media_UW is None:
            return self.language_model(x_NE, context)
        main, *deep = media_UW.chunk(self.spec.vision.num_features, dim=1)
        x_NE.index_copy_(0, media_rows, main)
        added = (media_rows, deep) if deep else ()
        return self.language_model(x_NE, context, *added)


def _check_channels(vision: TowerConfig) -> None:
    if vision.channels != CHANNELS:
        raise StartupError(f"config.json: `in_channels` must be {CHANNELS}, not {vision.channels}.")

"""A vision tower, its projector and Qwen's text decoder as one network; families differ in the tower and in names.

Shapes: N tokens, B bytes of pixels, P patches, C values of a patch, E hidden size, R rows to predict from,
V vocabulary, U tokens of pictures in the step, W = E * number of features of a token.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from saccade.errors import StartupError
from saccade.models.backbones import image_text_network
from saccade.models.backbones.qwen_config import TowerConfig
from saccade.models.backbones.qwen_facts import QwenFacts
from saccade.models.backbones.qwen_text import TextDecoder
from saccade.models.facts import Grid, MediaShape
from saccade.models.preprocessing.processor_config import CHANNELS
from saccade.nn.context import ForwardContext, VisionAttentionBackend
from saccade.nn.parallel import Ranks
from saccade.nn.vision import grid_list


class Tower(Protocol):
    """A vision tower and its projector, a torch module."""

    def finish(self) -> None:
        """Compute what depends on the loaded weights."""

    def prepare(self, grids: Sequence[Grid], backend: VisionAttentionBackend) -> Any:
        """Return all that depends on *grids*, computed on the host and copied without a device sync."""

    def __call__(self, patches_PC: torch.Tensor, metadata: Any) -> torch.Tensor:
        """Map normalised patches [P, C] to features [U, W], without a device sync."""


class Decoder(image_text_network.Decoder, Protocol):
    """A text decoder, a torch module."""

    def __call__(self, x_NE: torch.Tensor, context: ForwardContext, *added: Any) -> torch.Tensor:
        """Return normalised hidden states [N, E]. *added* are the rows and features of deepstack, if there are any."""


class QwenNetwork(image_text_network.ImageTextNetwork):
    """models.network.Network, but for `locate`. Parameters are empty until the loader has filled them.

    *decoder* is the class of the text decoder, made from the facts' text and the ranks.
    """

    visual: Tower
    language_model: Decoder
    decoder: ClassVar[type[Any]] = TextDecoder

    def __init__(
        self, facts: QwenFacts[Any], visual: nn.Module, settings: Mapping[str, Any], *, tied: bool, ranks: Ranks
    ) -> None:
        """*settings* are those of the family's Layout; with *tied* the embedding is the matrix of the logits."""
        super().__init__(self.decoder(facts.text, ranks), settings, facts.text, tied=tied)
        self.facts = facts
        self.visual = visual  # type: ignore[assignment]
        _check_channels(facts.vision)

    def finish(self) -> None:
        """Compute the values derived from loaded weights and their device. Call once, after loading."""
        self.visual.finish()
        super().finish()

    def prepare(self, items: Sequence[MediaShape], backend: VisionAttentionBackend) -> tuple[Any, list[int]]:
        """Return the metadata of *items* for `encode`, and each item's token count."""
        grids = grid_list(item.grid for item in items)
        return self.visual.prepare(grids, backend), [self.facts.item_tokens(grid) for grid in grids]

    def encode(self, pixels_B: torch.Tensor, metadata: Any) -> torch.Tensor:
        """Map uint8 patches to features [U, W], picture after picture."""
        pixels_PC = pixels_B.view(-1, self.facts.vision.patch_values)
        return self.visual(self.normalised(pixels_PC, self.dtype), metadata)

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
        main, *deep = media_UW.chunk(self.facts.vision.num_features, dim=1)
        x_NE.index_copy_(0, media_rows, main)
        added = (media_rows, deep) if deep else ()
        return self.language_model(x_NE, context, *added)


def _check_channels(vision: TowerConfig) -> None:
    if vision.channels != CHANNELS:
        raise StartupError(f"config.json: `in_channels` must be {CHANNELS}, not {vision.channels}.")

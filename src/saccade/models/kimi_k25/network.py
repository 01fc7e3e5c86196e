"""Vision tower, projector and text decoder.

Shapes: N tokens, B bytes of pixels, P patches, I values of a patch, E hidden size, R rows to predict from,
V vocabulary, U tokens of pictures in the step.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from saccade.models.backbones.deepseek_text import TextDecoder
from saccade.models.backbones.model_config import section
from saccade.models.backbones.moonvit import EncoderMetadata, Projector, VisionTower
from saccade.models.facts import MediaShape
from saccade.models.kimi_k25.facts import Facts
from saccade.models.kimi_k25.layout import Layout
from saccade.models.kimi_k25.weights import locate
from saccade.models.network import Target
from saccade.models.preprocessing.processor_config import CHANNELS
from saccade.nn.context import ForwardContext, VisionAttentionBackend
from saccade.nn.layers import Layer, Linear
from saccade.nn.parallel import ALONE, Ranks


class Network(Layer):
    """The engine's network of the family. Parameters are empty until the loader has filled them and called `finish`."""

    def __init__(
        self, facts: Facts, config: Mapping[str, Any], preprocessor: Mapping[str, Any], ranks: Ranks = ALONE
    ) -> None:
        super().__init__()
        text, vision = facts.text, facts.vision
        tied = section(config, "text_config").get("tie_word_embeddings", False)
        self.facts = facts
        self.tied = bool(config.get("tie_word_embeddings", tied))
        self.patch_values = CHANNELS * vision.patch_size**2
        self.vision_tower = VisionTower(vision, ranks.encoder)
        self.mm_projector = Projector(vision)
        self.language_model = TextDecoder(text, ranks)
        self.lm_head = None if self.tied else Linear(text.hidden_size, text.vocab_size, bias=False)
        settings = Layout(config, preprocessor).settings
        self.mean_std = [settings["image_mean"], settings["image_std"]]
        self.scaled_mean_std = torch.empty(0)

    @property
    def device(self) -> torch.device:
        return self.language_model.embedding_VE.device

    @property
    def dtype(self) -> torch.dtype:
        return self.language_model.embedding_VE.dtype

    def locate(self, name: str) -> Target | None:
        """Return the parameter that the checkpoint's tensor *name* fills; None if the tensor is not needed."""
        return locate(name, self.facts.text, self.tied)

    def finish(self) -> None:
        """Compute the values derived from loaded weights and their device. Call once, after loading."""
        self.vision_tower.finish()
        self.language_model.finish()
        self.scaled_mean_std = torch.tensor(self.mean_std, dtype=torch.float32, device=self.device) * 255

    def prepare(
        self, items: Sequence[MediaShape], backend: VisionAttentionBackend
    ) -> tuple[EncoderMetadata, list[int]]:
        """Return the metadata of *items* for `encode`, and each item's token count."""
        grids = [item.grid for item in items]
        return self.vision_tower.prepare(grids, backend), [self.facts.item_tokens(grid) for grid in grids]

    def encode(self, pixels_B: torch.Tensor, metadata: EncoderMetadata) -> torch.Tensor:
        """Map uint8 patches in raster order to features [U, E], picture after picture."""
        pixels_PI = pixels_B.view(-1, self.patch_values).index_select(0, metadata.order)
        mean, std = self.scaled_mean_std
        patches_PI = self.ops.normalise_pixels(pixels_PI, mean, std, self.dtype)
        return self.mm_projector(self.vision_tower(patches_PI, metadata))  # type: ignore[no-any-return]

    def forward(
        self,
        input_ids: torch.Tensor,
        context: ForwardContext,
        media_rows: torch.Tensor | None = None,
        media_UW: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return hidden states [N, E] for ids int64 [N]; media_UW replaces the embeddings at *media_rows* int64 [U]."""
        x_NE = self.language_model.embed(input_ids)
        if media_rows is not None and media_UW is not None:
            x_NE.index_copy_(0, media_rows, media_UW)
        return self.language_model(x_NE, context)  # type: ignore[no-any-return]

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """Return logits [R, V] in float32."""
        if self.lm_head is None:
            return functional.linear(hidden_RE, self.language_model.embedding_VE).float()
        return self.lm_head(hidden_RE).float()  # type: ignore[no-any-return]

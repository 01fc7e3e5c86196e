"""Vision tower, projector and text decoder.

Shapes: N tokens, B bytes of pixels, E hidden size, R rows to predict from, V vocabulary, U tokens of
pictures in the step, W = E * (1 + number of deepstack features).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from saccade.errors import StartupError
from saccade.models.backbones.model_config import section
from saccade.models.backbones.qwen_text import TextDecoder
from saccade.models.backbones.qwen_vision import EncoderMetadata, VisionTower
from saccade.models.facts import MediaShape
from saccade.models.network import Target
from saccade.models.preprocessing.processor_config import CHANNELS
from saccade.models.qwen3_vl.facts import Facts
from saccade.models.qwen3_vl.layout import Layout
from saccade.models.qwen3_vl.weights import locate
from saccade.nn.context import ForwardContext, VisionAttentionBackend
from saccade.nn.layers import Layer, Linear
from saccade.nn.parallel import ALONE, Ranks
from saccade.nn.vision import grid_list


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
        self.visual = VisionTower(vision)
        self.language_model = TextDecoder(text, ranks)
        self.lm_head = None if self.tied else Linear(text.hidden_size, text.vocab_size, bias=False)
        if vision.channels != CHANNELS:
            raise StartupError(f"config.json: `in_channels` must be {CHANNELS}, not {vision.channels}.")
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
        return locate(name, self.tied)

    def finish(self) -> None:
        """Compute the values derived from loaded weights and their device. Call once, after loading."""
        self.visual.finish()
        self.language_model.finish()
        self.scaled_mean_std = torch.tensor(self.mean_std, dtype=torch.float32, device=self.device) * 255

    def prepare(
        self, items: Sequence[MediaShape], backend: VisionAttentionBackend
    ) -> tuple[EncoderMetadata, list[int]]:
        """Return the metadata of *items* for `encode`, and each item's token count."""
        grids = grid_list(item.grid for item in items)
        return self.visual.prepare(grids, backend), [self.facts.item_tokens(grid) for grid in grids]

    def encode(self, pixels_B: torch.Tensor, metadata: EncoderMetadata) -> torch.Tensor:
        """Map uint8 patches to features [U, W], picture after picture."""
        pixels_PC = pixels_B.view(-1, self.facts.vision.patch_values)
        mean, std = self.scaled_mean_std
        # This order and precision is bit-equal to the reference processor, which folds 1/255 into mean and std.
        patches = self.ops.normalise_pixels(pixels_PC, mean, std, self.dtype)
        return self.visual.merge(*self.visual.forward_blocks(patches, metadata))

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
            return self.language_model(x_NE, context)  # type: ignore[no-any-return]
        main, *deep = media_UW.chunk(media_UW.shape[1] // x_NE.shape[1], dim=1)
        x_NE.index_copy_(0, media_rows, main)
        return self.language_model(x_NE, context, media_rows, deep)  # type: ignore[no-any-return]

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """Return logits [R, V] in float32."""
        if self.lm_head is None:
            return functional.linear(hidden_RE, self.language_model.embedding_VE).float()
        return self.lm_head(hidden_RE).float()  # type: ignore[no-any-return]

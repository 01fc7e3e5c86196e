"""Shared parts of networks with a vision tower and a text decoder: the ends of the text side, and pixel normalisation.

Shapes: N tokens, I values of a row of pixels, E hidden size, R rows to predict from, V vocabulary, U tokens of images,
W = E, except for families with several features for each token.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from saccade.nn.context import ForwardContext
from saccade.nn.layers import Layer, Linear
from saccade.nn.parallel import ALONE, Ranks


class Decoder(Protocol):
    """A text decoder, a torch module."""

    @property
    def embedding_VE(self) -> torch.Tensor:
        """The embedding table, which determines the device and dtype of the network."""

    def finish(self) -> None:
        """Compute the values derived from the loaded weights and their device."""

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Map ids int64 [N] to [N, E]."""

    def __call__(self, x_NE: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Return normalised hidden states [N, E]."""


class ImageTextNetwork(Layer):
    """models.network.Network, except for names and images. Parameters are empty until the loader has filled them."""

    language_model: Decoder

    def __init__(
        self,
        language_model: torch.nn.Module,
        settings: Mapping[str, Any],
        text: Any,
        *,
        tied: bool,
        ranks: Ranks = ALONE,
    ) -> None:
        """*settings* are those of the family's Layout; with *tied* the embedding is the matrix of the logits."""
        super().__init__()
        # Only rank 0 computes logits.
        self.has_logits = ranks.rank == 0
        self.loads_head = self.has_logits and not tied
        self.language_model = language_model  # type: ignore[assignment]
        self.lm_head = Linear(text.hidden_size, text.vocab_size, bias=False) if self.loads_head else None
        self.mean_std = [settings["image_mean"], settings["image_std"]]
        self.scaled_mean_std = torch.empty(0)

    @property
    def device(self) -> torch.device:
        return self.language_model.embedding_VE.device

    @property
    def dtype(self) -> torch.dtype:
        return self.language_model.embedding_VE.dtype

    def finish(self) -> None:
        """Compute the values derived from loaded weights and their device. Call once, after loading."""
        self.language_model.finish()
        self.scaled_mean_std = torch.tensor(self.mean_std, dtype=torch.float32, device=self.device) * 255
        if self.has_logits and not self.loads_head:
            # A separate layer shares the embedding's tensor, and is packed like other layers if that is faster.
            self.lm_head = Linear.of(self.language_model.embedding_VE)

    def normalised(self, pixels_NI: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return uint8 rows, channel after channel, normalised like the family's processor does."""
        mean, std = self.scaled_mean_std
        # This order and precision is bit-equal to the reference processor, which folds 1/255 into mean and std.
        return self.ops.normalise_pixels(pixels_NI, mean, std, dtype)

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
        return self.language_model(x_NE, context)

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """Return logits [R, V] in float32. Only rank 0 can."""
        return self.lm_head(hidden_RE).float()  # type: ignore[misc,no-any-return]

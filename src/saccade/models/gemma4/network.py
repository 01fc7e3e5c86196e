"""The image encoder and the text decoder as one network.

Shapes: N tokens, E hidden size, R rows to predict from, V vocabulary, U image tokens.
"""

import torch

from saccade.models.backbones.merging_network import MergingNetwork
from saccade.models.gemma4.layout import Layout, UnifiedLayout
from saccade.models.gemma4.spec import GemmaText, Spec
from saccade.models.gemma4.text import GemmaDecoder
from saccade.models.gemma4.tower import GemmaTower
from saccade.models.gemma4.unified import UnifiedEmbedder
from saccade.models.gemma4.weights import target
from saccade.models.network import Target
from saccade.nn.context import ForwardContext


class GemmaNetwork(MergingNetwork):
    """Implements models.network.Network; a family adds its *tower*.

    Parameters are empty until the loader has filled them.
    """

    decoder = GemmaDecoder
    spec: Spec
    language_model: GemmaDecoder

    def target(self, name: str) -> Target | None:
        """Return the parameter for the tensor *name*; None if the network does not need it.

        It needs no audio tensors, and no tensors for keys and values in layers that use another layer's.
        """
        place = target(name)
        text: GemmaText = self.spec.text
        if place is None or not place.parameter.startswith("language_model.layers."):
            return place
        layer = int(place.parameter.split(".")[2])
        is_of_keys = ".k_norm." in place.parameter or (".qkv_proj." in place.parameter and place.partition != 0)
        return None if is_of_keys and text.cache_of(layer) != layer else place

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
            input_ids = input_ids.index_fill(0, media_rows, self.spec.text.pad_token_id)
        return self.language_model.decode(x_NE, context, self.language_model.own_embeddings(x_NE, input_ids))

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """Return logits [R, V] in float32 on rank 0, with a soft cap if the model has one. All ranks must call this."""
        logits, cap = super().logits(hidden_RE), self.spec.text.soft_cap
        if cap is None:
            return logits
        # The difference is 0, or NaN for infinite logits, which the cap alone would make finite.
        return (logits / cap).tanh() * cap + (logits - logits)


class Network(GemmaNetwork):
    """The network with a vision tower."""

    layout, tower = Layout, GemmaTower


class UnifiedNetwork(GemmaNetwork):
    """The network without a tower."""

    layout, tower = UnifiedLayout, UnifiedEmbedder

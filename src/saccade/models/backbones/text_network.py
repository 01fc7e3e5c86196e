"""A text decoder with its embedding and head: the base of every network, and all that a text-only network has.

Shapes: N tokens, E hidden size, R rows to predict from, V vocabulary, U image tokens, W = E, except for families with
several features for each token.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from saccade.models.backbones.decoder import TextDecoder
from saccade.models.network import Derived, Target
from saccade.nn.context import ForwardContext
from saccade.nn.layers import Layer, Linear, finish
from saccade.nn.parallel import ALONE, Ranks
from saccade.nn.rope import inverse_frequencies

TEXT, HEAD, EMBEDDING = "language_model.", "lm_head.", "language_model.embed_tokens."
FREQUENCIES = ".rotary_emb.inv_freq"
LAYER = re.compile(r"language_model\.layers\.(\d+)\.")


class TextNetwork(Layer):
    """Implements models.network.Network, except for images. Parameters are empty until the loader has filled them.

    A family sets its *decoder*, which is built from the spec's text and the ranks, and adds `target`. Networks that
    take images also read config.json and the image processor's settings, which this one ignores.
    """

    decoder: ClassVar[Callable[..., Any]]

    def __init__(
        self, spec: Any, config: Mapping[str, Any], preprocessor: Mapping[str, Any], ranks: Ranks = ALONE
    ) -> None:
        super().__init__()
        self.spec = spec
        self.is_tied = spec.text.tied
        self.language_model: TextDecoder = self.decoder(spec.text, ranks)
        self.lm_head = None if self.is_tied else self._head()

    @property
    def device(self) -> torch.device:
        return self.language_model.embedding_VE.device

    @property
    def dtype(self) -> torch.dtype:
        return self.language_model.embedding_VE.dtype

    def target(self, name: str) -> Target | None:
        """Return the parameter for the release's tensor *name*; None if no network of the family needs it."""
        raise NotImplementedError

    def _head(self) -> Linear:
        text, ranks = self.spec.text, self.language_model.embed_tokens.ranks
        return Linear(text.hidden_size, text.vocab_size, bias=False, split="outputs", ranks=ranks)

    def untie(self) -> None:
        """Give the network a separate head, still empty. Call before loading."""
        with torch.device(self.device):
            self.lm_head = self._head().to(self.dtype)
        self.is_tied = False

    def is_head(self, name: str) -> bool:
        """Return whether the checkpoint's tensor *name* belongs to the head, which computes the logits."""
        target = self.target(name)
        return target is not None and target.parameter.startswith(HEAD)

    def locate(self, name: str) -> Target | Derived | None:
        """Return the parameter that the checkpoint's tensor *name* fills; None if the tensor is not needed.

        A tied head fills the embedding. Old releases also have rotary frequencies, which the configuration determines.
        """
        target = self.target(name)
        if target is None:
            return None
        if target.parameter.startswith(TEXT) and name.endswith(FREQUENCIES):
            return self._frequencies(target)
        if self.is_tied and target.parameter.startswith(HEAD):
            return target._replace(parameter=target.parameter.replace(HEAD, EMBEDDING, 1))
        return target

    def _frequencies(self, target: Target) -> Derived | Target:
        """Return the rotary frequencies of a layer, or of the whole decoder; *target* if there is no such layer.

        Releases store either the frequencies that their code uses, or those before stretching for longer contexts.
        """
        match = LAYER.match(target.parameter)
        layer = 0 if match is None else int(match[1])
        if layer >= self.spec.text.num_layers:
            return target
        rope = self.spec.text.rope_of(layer)
        size, cpu = 2 * len(rope.divisors), torch.device("cpu")
        every = (inverse_frequencies(rope.theta, size, cpu, divisors) for divisors in (rope.divisors, None))
        return Derived(tuple(every), "the rotary positions of config.json")

    def finish(self) -> None:
        """Compute the values that derive from loaded weights and their device. Call once, after loading."""
        for part in self.children():
            finish(part)
        self.make_tied_head()

    def make_tied_head(self) -> None:
        """Give a tied network its head, unless it has one: a layer that shares the loaded embedding's tensor."""
        if self.lm_head is None:
            # It is packed like other layers if that is faster.
            self.lm_head = Linear.of(self.language_model.embedding_VE)

    def share_head(self) -> None:
        """Read the vectors of a tied embedding from the packed head, if its layout allows it. Call it after packing."""
        if self.is_tied and self.lm_head is not None and self.lm_head.packed is not None:
            self.language_model.embed_tokens.read_from(self.lm_head.packed)

    def forward(
        self,
        input_ids: torch.Tensor,
        context: ForwardContext,
        media_rows: torch.Tensor | None = None,
        media_UW: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return hidden states [N, E] for ids int64 [N]; media_UW replaces the embeddings at *media_rows* int64 [U].

        If a token has several features, all but the first are added after the first layers.
        """
        x_NE = self.embed(input_ids, media_rows, media_UW)
        if media_UW is None:
            return self.language_model(x_NE, context)  # type: ignore[no-any-return]
        deep = media_UW.split(x_NE.shape[1], dim=1)[1:]
        return self.language_model(x_NE, context, media_rows, deep)  # type: ignore[no-any-return]

    def embed(
        self, input_ids: torch.Tensor, media_rows: torch.Tensor | None = None, media_UW: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the decoder's input [N, E] for the same arguments as `forward`."""
        x_NE = self.language_model.embed(input_ids)
        if media_rows is not None and media_UW is not None:
            x_NE.index_copy_(0, media_rows, media_UW[:, : x_NE.shape[1]])
        return x_NE

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """Return logits [R, V] in float32 on rank 0. All ranks must call this; the others get only their part."""
        part = self.lm_head(hidden_RE)  # type: ignore[misc]
        return self.language_model.embed_tokens.ranks.gather(part).float()

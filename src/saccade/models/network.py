"""Network: the interface of the engine to a family's network. The model's facts are in models.facts, without torch."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from saccade.models.facts import Grid, ModelFacts
from saccade.nn.context import ForwardContext, VisionAttentionBackend


class Target(Protocol):
    """A parameter's name, and the partition of its rows that a checkpoint tensor fills (None: all)."""

    @property
    def parameter(self) -> str: ...

    @property
    def partition(self) -> int | None: ...


class Network(Protocol):
    """A torch module on one device. Shapes: N tokens, P patches, C values of a patch, U tokens of media, V vocabulary.

    W is the width of features: the hidden size, times a factor of the family.
    """

    @property
    def facts(self) -> ModelFacts: ...

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""

    def locate(self, name: str) -> Target | None:
        """Return the parameter that the checkpoint's tensor *name* fills; None if the tensor is not needed."""

    def finish(self) -> None:
        """Compute the values derived from loaded weights and their device. Call once, after loading."""

    def prepare(self, grids: Sequence[Grid], backend: VisionAttentionBackend) -> tuple[Any, list[int]]:
        """Return the metadata of *grids* for `encode`, and each media item's token count. Runs on the host."""

    def encode(self, pixels_PC: torch.Tensor, metadata: Any) -> torch.Tensor:
        """Map uint8 patches to features [U, W]. *metadata* comes from prepare(). The host does not wait."""

    def __call__(
        self,
        input_ids: torch.Tensor,
        context: ForwardContext,
        media_rows: torch.Tensor | None = None,
        media_UW: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return hidden states [N, E] for ids int64 [N]; media_UW replaces the embeddings at *media_rows* int64 [U]."""

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """Return logits [R, V] in float32."""

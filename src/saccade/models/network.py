"""Network: the engine's interface to a family's network. The model's spec is in models.spec, without torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from saccade.models.spec import MediaShape, ModelSpec
from saccade.nn.context import ForwardContext, VisionAttentionBackend
from saccade.nn.layerwise import Layerwise


class Target(NamedTuple):
    """Where a checkpoint tensor goes in the network.

    It fills *partition* of the parameter, or all partitions in order if *partition* is None; with *expert*, only that
    expert's rows. *transposed*: the checkpoint stores the last two dimensions in the other order.
    """

    parameter: str
    partition: int | None = None
    expert: int | None = None
    transposed: bool = False


class Derived(NamedTuple):
    """A checkpoint tensor that the network computes itself. It must equal one of *values*, or it is refused.

    *words* say where the network's values come from.
    """

    values: tuple[torch.Tensor, ...]
    words: str


@runtime_checkable
class LoadsItself(Protocol):
    """A network that fills its parameters by its library's loader, not by name."""

    def load_weights(self, folder: Path, device: torch.device) -> int:
        """Fill the parameters from the checkpoint in *folder*, and return how many values they have.

        Raises StartupError.
        """


class Network(Protocol):
    """A torch module on one device. Shapes: N tokens, B bytes of pixels, U tokens of media, V vocabulary.

    W is the width of features: the hidden size, times a factor that depends on the family.
    """

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""

    @property
    def is_tied(self) -> bool:
        """Whether the embedding is also the logits matrix, so that a checkpoint's head fills the embedding."""

    def untie(self) -> None:
        """Give the network a separate head, still empty. Call before loading."""

    def make_tied_head(self) -> None:
        """Give a tied network its head, unless it has one: a layer that shares the loaded embedding's tensor."""

    def share_head(self) -> None:
        """Hold a tied embedding in memory once, if the layout of the packed head allows it. Call it after packing."""

    def is_head(self, name: str) -> bool:
        """Return whether the checkpoint's tensor *name* belongs to the head, which computes the logits."""

    def locate(self, name: str) -> Target | Derived | None:
        """Return the parameter that the checkpoint's tensor *name* fills; None if the tensor is not needed."""

    def finish(self) -> None:
        """Compute the values that derive from loaded weights and their device. Call once, after loading."""

    def prepare(self, items: Sequence[MediaShape], backend: VisionAttentionBackend) -> Any:
        """Return the metadata of *items*, all of one modality, for `encode`. Runs on the host."""

    def encode(self, pixels_B: torch.Tensor, metadata: Any) -> Layerwise:
        """Map the uint8 pixels of all items, one after the other, to features [U, W]; *metadata* is from prepare().

        The generator runs nothing until it is advanced. It pauses after each block of the tower, and the host does not
        wait.
        """

    def __call__(
        self,
        input_ids: torch.Tensor,
        context: ForwardContext,
        media_rows: torch.Tensor | None = None,
        media_UW: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return hidden states [N, E] for ids int64 [N]; media_UW replaces the embeddings at *media_rows* int64 [U]."""

    def embed(
        self, input_ids: torch.Tensor, media_rows: torch.Tensor | None = None, media_UW: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the embeddings [N, E] for the same arguments as a call, with the features in place."""

    def draft(
        self, x_NE: torch.Tensor, hidden_NE: torch.Tensor, context: ForwardContext, *, attends: bool = True
    ) -> torch.Tensor:
        """Return states [N, E], whose `logits` predict the tokens after those with embeddings *x_NE*.

        *hidden_NE* are the hidden states of the tokens before those, and *context* has their positions and slots.
        Without *attends*, only keys and values are written, and the result has no meaning. Only networks whose spec
        has `drafts` set support this.
        """

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """Return logits [R, V] in float32 on rank 0. All ranks must call this; on others, the result is undefined."""

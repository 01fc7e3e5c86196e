"""A model's spec for the engine's core: counts, sizes, positions and kinds of state. Does not import torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from saccade.models.positions import PlainPositions
from saccade.protocol.media import MediaItem

Grid = tuple[int, int, int]
Size = tuple[int, int]

NETWORK_DTYPE = "network"
IMAGE, VIDEO = "image", "video"
"""Modalities of media items."""

MAX_MODEL_LEN, PLACEHOLDER_TOKEN_ID, DRAFTS, MODEL_IMPL = (
    "max_model_len",
    "placeholder_token_id",
    "drafts",
    "model_impl",
)
"""Keys that models.files adds to config.json."""


class MediaShape(NamedTuple):
    """A media item's grid, and (height, width) of the image before resizing if the wire carries them."""

    grid: Grid
    original_size: Size | None = None
    modality: str = IMAGE


@dataclass(frozen=True)
class Paged:
    """A layer's state is a key and a value for each token and head, in blocks.

    With *window*, a token sees that many tokens, including itself, and image tokens also see the rest of their image.
    The state of earlier tokens is dropped. All sliding-window layers of a model have the same window.
    """

    num_kv_heads: int
    key_width: int
    value_width: int
    window: int | None = None

    @property
    def token_values(self) -> int:
        """The number of values per token."""
        return self.num_kv_heads * (self.key_width + self.value_width)

    def num_kept(self, num_tokens: int) -> int:
        """Return how many of *num_tokens* tokens keep their state."""
        return num_tokens if self.window is None else min(num_tokens, self.window)


@dataclass(frozen=True)
class Latent:
    """A layer's state is one compressed vector and one rotated key for each token, in blocks."""

    width: int
    rope_width: int
    window = None

    @property
    def token_values(self) -> int:
        """The number of values per token."""
        return self.width + self.rope_width

    def num_kept(self, num_tokens: int) -> int:
        """Return how many of *num_tokens* tokens keep their state: all of them."""
        return num_tokens


class HeadCut(NamedTuple):
    """Dimension *dim* of a tensor consists of *parts*, each a number of heads and a number of entries per head."""

    dim: int
    parts: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Recurrent:
    """A layer's state has the same size for every sequence: tensors with these *shapes* and torch *dtypes*.

    NETWORK_DTYPE stands for the network's dtype. Dimension cuts[i].dim of tensor i consists of heads, which are divided
    among the ranks.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    cuts: tuple[HeadCut, ...] = ()

    def of_rank(self, share: Callable[[int], int]) -> "Recurrent":
        """Return the state on one rank; *share* maps a number of heads to the number on a rank."""
        if not self.cuts:
            return self
        shapes = [list(shape) for shape in self.shapes]
        for shape, cut in zip(shapes, self.cuts, strict=True):
            shape[cut.dim] = sum(share(heads) * width for heads, width in cut.parts)
        return replace(self, shapes=tuple(map(tuple, shapes)))


KvSpec = Paged | Latent | Recurrent


def has_states(kv_specs: Sequence[KvSpec]) -> bool:
    """Return whether one of the layers with *kv_specs* keeps a state of a fixed size."""
    return any(isinstance(kv_spec, Recurrent) for kv_spec in kv_specs)


def window_of(kv_specs: Sequence[KvSpec]) -> int | None:
    """Return the window of the sliding-window layers, or None if there are none."""
    return next((one.window for one in kv_specs if isinstance(one, Paged) and one.window is not None), None)


def blocks_seen(window: int, block_size: int) -> int:
    """Return how many blocks before a block boundary are visible to the first token after the boundary."""
    return -(-(window - 1) // block_size)


def most_window_blocks(window: int, block_size: int, longest_whole: int) -> int:
    """Return the most blocks that a sequence needs at once in sliding-window layers.

    They hold the window, and the one token or *longest_whole* tokens that one step computes.
    """
    return blocks_seen(window, block_size) + 2 + -(-max(longest_whole, 1) // block_size)


class Positions(Protocol):
    """Positions of a whole sequence, from one formula for prefill, decode and recomputation.

    After the prompt, a token's position is its index + *delta*.
    """

    delta: int

    def slice(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the positions [3, stop - start] of tokens [start, stop)."""


class TextHalf(Protocol):
    """The part of a model's configuration that describes its text decoder."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int: ...

    @property
    def rope(self) -> Any: ...

    @property
    def kv_specs(self) -> tuple[KvSpec, ...]: ...


class ModelSpec:
    """A model's spec, from its configuration.

    A family supplies *text* and *placeholder_of*, the token id of each modality. If it takes media, it also supplies
    the first methods below, and overrides the others if their values differ. Grids are (frames, rows, columns) in
    patches; a video's frames are counted in groups that share patches. Original sizes are (height, width) of the image
    before resizing, if the wire carries them.
    """

    text: TextHalf
    placeholder_of: Mapping[str, int]

    @property
    def longest_whole(self) -> int:
        """The longest placeholder run that a step must compute whole, since its tokens see each other; 0 for none.

        In such a model, layers with `looks_ahead` see each run to its end.
        """
        return 0

    @property
    def joint_frames(self) -> int:
        """The number of a grid's frames that see each other in the tower."""
        return 1

    def item_tokens(self, grid: Grid, original_size: Size | None = None) -> int:
        """Return a media item's number of placeholder tokens. Raises InvalidValue for an impossible grid."""
        raise NotImplementedError

    def pixel_shape(self, grid: Grid, modality: str = IMAGE) -> tuple[int, ...]:
        """Return the shape of a grid's uint8 pixels on the wire, as in the family's layouts."""
        raise NotImplementedError

    def encode_cost(self, grid: Grid) -> int:
        """Return the number of patches that the vision encoder processes."""
        raise NotImplementedError

    @property
    def num_encoder_layers(self) -> int:
        """The number of layers in the vision encoder, which can pause after each."""
        raise NotImplementedError

    def square_grid(self, max_patches: int) -> Grid:
        """Return the grid of a square image with at most *max_patches* patches, or the smallest grid."""
        raise NotImplementedError

    def video_parts(self, grid: Grid, most_patches: int) -> list[Grid]:
        """Return the grids of a video's parts, each of at most *most_patches*.

        The parts may be encoded one after another. Each consists of whole runs of frames that see each other, and is
        larger only if a single run is.
        """
        frames, rows, columns = grid
        run = self.joint_frames
        length = run * max(1, most_patches // (run * rows * columns))
        return [(min(length, frames - first), rows, columns) for first in range(0, frames, length)]

    def padding_grid(self, num_patches: int) -> Grid | None:
        """Return the grid of an image with exactly *num_patches* patches, a multiple of the smallest image's.

        Return None if the family does not have such images for every multiple.
        """
        return None

    def span_lengths(self, grid: Grid, modality: str) -> tuple[int, ...] | None:
        """Return the lengths of an item's runs of placeholders, or None if positions do not depend on them."""
        return None

    def positions(self, media: Sequence[MediaItem]) -> Positions:
        """Return the positions of a sequence that shows *media*, whose spans have been checked."""
        return PlainPositions()

    @property
    def takes_more_tokens(self) -> bool:
        """Whether a sequence may have more tokens than positions, since images take fewer positions."""
        return False

    @property
    def feature_width(self) -> int:
        """The number of values in a token's features."""
        return self.text.hidden_size

    def encoder_output_values(self, grid: Grid, original_size: Size | None = None) -> int:
        """Return the number of values in the features of a media item."""
        return self.item_tokens(grid, original_size) * self.feature_width

    @property
    def kv_specs(self) -> tuple[KvSpec, ...]:
        """The kind of state that each layer keeps for a sequence."""
        return self.text.kv_specs

    @property
    def drafts(self) -> bool:
        """Whether the network includes its draft layer. If so, the last two of *kv_specs* belong to that layer."""
        return False

    @property
    def vocab_size(self) -> int:
        """The number of rows in the embedding."""
        return self.text.vocab_size

    @property
    def max_position_embeddings(self) -> int:
        """The model's longest sequence, in tokens."""
        return self.text.max_position_embeddings

    @property
    def rope_factors(self) -> str:
        """The set of rotary factors that the settings chose; empty for a model with one set."""
        return str(self.text.rope.factors)

    @property
    def takes_media(self) -> bool:
        """Whether the model takes media, not only text. If not, methods that take grids are never called."""
        return bool(self.placeholder_of)

    @property
    def placeholder_token_ids(self) -> tuple[int, ...]:
        """The ids of all placeholders."""
        return tuple(dict.fromkeys(self.placeholder_of.values()))

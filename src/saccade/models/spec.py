"""The spec of a model for the engine's core: counts, sizes, positions, kinds of state. No torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from saccade.protocol.media import MediaItem

Grid = tuple[int, int, int]
Size = tuple[int, int]

NETWORK_DTYPE = "network"
IMAGE, VIDEO = "image", "video"
"""Modalities of media items."""

MAX_MODEL_LEN, PLACEHOLDER_TOKEN_ID = "max_model_len", "placeholder_token_id"
"""Keys that models.files.engine_config adds to config.json."""


class MediaShape(NamedTuple):
    """A media item's grid, and (height, width) of the image before resizing if the wire carries them."""

    grid: Grid
    original_size: Size | None = None
    modality: str = IMAGE


@dataclass(frozen=True)
class Paged:
    """A layer's state is a key and a value for each token and head, in blocks."""

    num_kv_heads: int
    key_width: int
    value_width: int

    @property
    def token_values(self) -> int:
        """Number of values per token."""
        return self.num_kv_heads * (self.key_width + self.value_width)


@dataclass(frozen=True)
class Latent:
    """A layer's state is one compressed vector and one rotated key for each token, in blocks."""

    width: int
    rope_width: int

    @property
    def token_values(self) -> int:
        """Number of values per token."""
        return self.width + self.rope_width


class HeadCut(NamedTuple):
    """Dimension *dim* of a tensor consists of *parts*: a number of heads, and the entries of each."""

    dim: int
    parts: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Recurrent:
    """A layer's state has the same size for every sequence: tensors of these shapes and torch dtypes, by name.

    The dtype NETWORK_DTYPE is that of the network.
    Dimension cuts[i].dim of tensor i consists of heads, which ranks share.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    cuts: tuple[HeadCut, ...] = ()

    def of_rank(self, share: Callable[[int], int]) -> "Recurrent":
        """Return the state on one rank; *share* maps a number of heads to that of a rank."""
        if not self.cuts:
            return self
        shapes = [list(shape) for shape in self.shapes]
        for shape, cut in zip(shapes, self.cuts, strict=True):
            shape[cut.dim] = sum(share(heads) * width for heads, width in cut.parts)
        return replace(self, shapes=tuple(map(tuple, shapes)))


KvSpec = Paged | Latent | Recurrent


class Positions(Protocol):
    """Positions of a whole sequence, by one formula for prefill, decode and recomputation.

    After the prompt, a token's position is its index + *delta*.
    """

    delta: int

    def slice(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the positions [3, stop - start] of tokens [start, stop)."""


class ModelSpec(Protocol):
    """A model's spec, from its configuration. *kv_specs* has one entry for each layer.

    *placeholder_of* maps a modality to its token id. Grids are (frames, rows, columns) in patches; of a video, frames
    are groups of those that share patches. Original sizes are (height, width) of the image before resizing, if the
    wire carries them.
    """

    @property
    def kv_specs(self) -> tuple[KvSpec, ...]: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int: ...

    @property
    def rope_factors(self) -> str:
        """The set of rotary factors that the settings chose; empty for a model with one set."""

    @property
    def placeholder_of(self) -> Mapping[str, int]: ...

    @property
    def placeholder_token_ids(self) -> tuple[int, ...]: ...

    def item_tokens(self, grid: Grid, original_size: Size | None = None) -> int:
        """Return the number of placeholder tokens of a media item. Raises InvalidValue for an impossible grid."""

    def pixel_shape(self, grid: Grid) -> tuple[int, ...]:
        """Return the shape of the uint8 pixels of a grid on the wire, as the family's Layout gives it."""

    def video_pixel_shape(self, grid: Grid) -> tuple[int, ...]:
        """Return the shape of the uint8 pixels of a video's grid; for models with a placeholder for videos only."""

    def video_parts(self, grid: Grid, most_patches: int) -> list[Grid]:
        """Return the grids of a video's parts, of at most *most_patches*, which may be encoded one after another.

        A part is larger if frames that see each other are. Only for models with a placeholder for videos.
        """

    def encode_cost(self, grid: Grid) -> int:
        """Return the number of patches that the vision encoder processes."""

    def encoder_output_values(self, grid: Grid, original_size: Size | None = None) -> int:
        """Return the number of values in the features of a media item."""

    def square_grid(self, max_patches: int) -> Grid:
        """Return the grid of a square image of at most *max_patches* patches; at least the smallest grid."""

    def padding_grid(self, num_patches: int) -> Grid | None:
        """Return the grid of an image of exactly *num_patches* patches, a multiple of the smallest image's.

        None if the family has no such images for every multiple.
        """

    def span_lengths(self, grid: Grid, modality: str) -> tuple[int, ...] | None:
        """Return the lengths of an item's runs of placeholders, on which positions depend; None if they do not."""

    def positions(self, media: Sequence[MediaItem]) -> Positions:
        """Return the positions of a sequence that shows *media*, whose spans were checked."""

"""Shared parts of several families' specs: the sizes of the text half, and images of merged patches. No torch."""

from collections.abc import Mapping
from math import isqrt, prod
from typing import Protocol

from saccade.errors import InvalidValue
from saccade.models.spec import VIDEO, Grid, KvSpec, Size


class TextSizes(Protocol):
    """The configuration of a text half."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int: ...

    @property
    def kv_specs(self) -> tuple[KvSpec, ...]: ...


class MergedPatches(Protocol):
    """The configuration of a vision tower that makes one token of merge_size * merge_size patches."""

    @property
    def merge_size(self) -> int: ...


class TextSpec:
    """The properties of models.spec.ModelSpec that depend only on *text*."""

    text: TextSizes

    @property
    def kv_specs(self) -> tuple[KvSpec, ...]:
        """Return what each layer keeps."""
        return self.text.kv_specs

    @property
    def rope_factors(self) -> str:
        """Return that there is one set of rotary factors."""
        return ""

    @property
    def vocab_size(self) -> int:
        """Number of rows of the embedding."""
        return self.text.vocab_size

    def span_lengths(self, grid: Grid, modality: str) -> tuple[int, ...] | None:
        """Return None: positions do not depend on the places of an item's placeholders."""
        return None

    @property
    def max_position_embeddings(self) -> int:
        """The model's longest sequence, in tokens."""
        return self.text.max_position_embeddings


class MergedPatchSpec(TextSpec):
    """The methods of models.spec.ModelSpec for images of one frame whose patches are merged, and videos of them."""

    vision: MergedPatches
    placeholder_of: Mapping[str, int]

    def item_tokens(self, grid: Grid, original_size: Size | None = None) -> int:
        """Return one token for every merged square of patches. Raises InvalidValue for a grid that cannot be merged."""
        frames, rows, columns = grid
        merge = self.vision.merge_size
        takes_videos = VIDEO in self.placeholder_of
        if min(grid) < 1 or (frames > 1 and not takes_videos) or rows % merge or columns % merge:
            number = "one frame, or in a video several," if takes_videos else "one frame"
            raise InvalidValue(
                f"An image's grid must be {number} of rows and columns that are multiples of {merge}, "
                f"not {tuple(grid)}."
            )
        return frames * rows * columns // merge**2

    @property
    def joint_frames(self) -> int:
        """The number of frames of a grid that see each other in the tower."""
        return 1

    def video_parts(self, grid: Grid, most_patches: int) -> list[Grid]:
        """Return the grids of the parts of a video, each of whole runs of frames that see each other."""
        frames, rows, columns = grid
        run = self.joint_frames
        length = run * max(1, most_patches // (run * rows * columns))
        return [(min(length, frames - first), rows, columns) for first in range(0, frames, length)]

    def encode_cost(self, grid: Grid) -> int:
        """Return the number of patches."""
        return prod(grid)

    def square_grid(self, max_patches: int) -> Grid:
        """Return a square of whole merged squares."""
        merge = self.vision.merge_size
        side = max(merge, isqrt(max_patches) // merge * merge)
        return 1, side, side

    def padding_grid(self, num_patches: int) -> Grid | None:
        """Return one row of merged squares."""
        merge = self.vision.merge_size
        return 1, merge, num_patches // merge

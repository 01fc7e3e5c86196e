"""Specs of models that merge squares of patches, with plain positions or grid positions. Does not import torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt, prod
from typing import Any, ClassVar

from saccade.errors import InvalidValue, StartupError
from saccade.models.backbones.model_config import integer
from saccade.models.positions import GridSpan, MultimodalPositions
from saccade.models.preprocessing.processor_config import CHANNELS
from saccade.models.spec import IMAGE, VIDEO, Grid, ModelSpec, Size
from saccade.protocol.media import MediaItem


def placeholders(config: Mapping[str, Any], vocab_size: int) -> Mapping[str, int]:
    """Return the placeholder ids of images and videos in config.json. Raises StartupError."""
    ids = {kind: integer(config, f"{kind}_token_id", least=0) for kind in (IMAGE, VIDEO)}
    if max(ids.values()) >= vocab_size:
        raise StartupError("config.json: `image_token_id` and `video_token_id` must be below `vocab_size`.")
    return ids


class MergedPatchSpec(ModelSpec):
    """The spec for images and videos in which each square of vision.merge_size^2 patches becomes one token.

    An image's patch has one frame; a video's has vision.temporal_patch_size.
    """

    vision: Any

    def patch_values(self, modality: str = IMAGE) -> int:
        """Return the number of values in a patch."""
        frames: int = self.vision.temporal_patch_size if modality == VIDEO else 1
        return CHANNELS * int(self.vision.patch_size) ** 2 * frames

    def pixel_shape(self, grid: Grid, modality: str = IMAGE) -> tuple[int, ...]:
        """Return (number of patches, values per patch)."""
        return prod(grid), self.patch_values(modality)

    def item_tokens(self, grid: Grid, original_size: Size | None = None) -> int:
        """Return the number of merged squares of patches. Raises InvalidValue for a grid that cannot be merged."""
        frames, rows, columns = grid
        merge = self.vision.merge_size
        if min(grid) < 1 or rows % merge or columns % merge:
            raise InvalidValue(
                "An image's grid must be one frame, or in a video several, of rows and columns that are multiples of "
                f"{merge}, not {tuple(grid)}."
            )
        return int(frames * rows * columns // merge**2)

    def encode_cost(self, grid: Grid) -> int:
        """Return the number of patches."""
        return prod(grid)

    @property
    def num_encoder_layers(self) -> int:
        """The number of blocks in the tower."""
        return int(self.vision.depth)

    def square_grid(self, max_patches: int) -> Grid:
        """Return the largest square grid of whole merged squares within *max_patches*, but at least one such square."""
        merge = self.vision.merge_size
        side = max(merge, isqrt(max_patches) // merge * merge)
        return 1, side, side

    def padding_grid(self, num_patches: int) -> Grid | None:
        """Return the grid of one row of merged squares with *num_patches* patches."""
        merge = self.vision.merge_size
        return 1, merge, num_patches // merge


@dataclass(frozen=True)
class GridSpec(MergedPatchSpec):
    """The spec for models whose positions follow the grids, on three axes.

    With *divides_videos*, there is text between a video's frame groups, so each group has positions like an image's.
    """

    divides_videos: ClassVar[bool] = True

    def span_lengths(self, grid: Grid, modality: str) -> tuple[int, ...]:
        """Return the lengths of an item's runs of placeholders: one run, or one for each group of a video's frames."""
        num_runs = grid[0] if modality == VIDEO and self.divides_videos else 1
        return (self.item_tokens(grid) // num_runs,) * num_runs

    @property
    def takes_more_tokens(self) -> bool:
        # Releases advise it together with YaRN; without it such a length is more likely a mistake.
        return any(divisor != 1 for divisor in self.text.rope.divisors)

    def positions(self, media: Sequence[MediaItem]) -> MultimodalPositions:
        """Return the positions. The tokens of an image or video have the positions of its merged grid."""
        return MultimodalPositions(sorted(span for item in media for span in self._grid_spans(item)))

    def time_step(self, item: MediaItem) -> float:
        """Return the distance between the positions of a video's successive frame groups."""
        return 1.0

    def _grid_spans(self, item: MediaItem) -> Iterator[GridSpan]:
        merge = self.vision.merge_size
        frames, rows, columns = item.grid
        grid = frames // len(item.spans), rows // merge, columns // merge
        for span in item.spans:
            yield GridSpan(span.start, grid, self.time_step(item))

"""The spec of a model whose positions of images and videos are those of their grids, on three axes. No torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from saccade.models.positions import GridSpan, MultimodalPositions
from saccade.models.spec import IMAGE, VIDEO, Grid, MergedPatchSpec
from saccade.protocol.media import MediaItem


@dataclass(frozen=True)
class GridSpec(MergedPatchSpec):
    """models.spec.ModelSpec. With *divides_videos* there is text between the groups of a video's frames, so that each
    has the positions of an image.
    """

    divides_videos: ClassVar[bool] = True

    def pixel_shape(self, grid: Grid, modality: str = IMAGE) -> tuple[int, ...]:
        """Return (patches, values per patch: of a video, of all frames of its group)."""
        frames = self.vision.temporal_patch_size if modality == VIDEO else 1
        return prod(grid), self.vision.patch_values * frames

    def span_lengths(self, grid: Grid, modality: str) -> tuple[int, ...]:
        """Return the lengths of an item's runs of placeholders: one run, or one for each group of a video's frames."""
        num_runs = grid[0] if modality == VIDEO and self.divides_videos else 1
        return (self.item_tokens(grid) // num_runs,) * num_runs

    def positions(self, media: Sequence[MediaItem]) -> MultimodalPositions:
        """Return the positions; tokens of an image or video have those of the merged grid."""
        return MultimodalPositions(sorted(span for item in media for span in self._grid_spans(item)))

    def time_step(self, item: MediaItem) -> float:
        """Return the distance of the positions of successive groups of a video's frames."""
        return 1.0

    def _grid_spans(self, item: MediaItem) -> Iterator[GridSpan]:
        merge = self.vision.merge_size
        frames, rows, columns = item.grid
        grid = frames // len(item.spans), rows // merge, columns // merge
        for span in item.spans:
            yield GridSpan(span.start, grid, self.time_step(item))

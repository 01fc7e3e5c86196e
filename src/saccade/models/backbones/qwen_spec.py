"""The spec of Qwen's models for the engine's core. No torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Generic, Self, TypeVar

from saccade.errors import StartupError
from saccade.models.backbones.model_config import integer
from saccade.models.backbones.qwen_config import QwenTextConfig, TowerConfig
from saccade.models.backbones.shared_spec import MergedPatchSpec
from saccade.models.positions import GridSpan, MultimodalPositions
from saccade.models.spec import IMAGE, VIDEO, Grid, Size
from saccade.protocol.media import MediaItem

Tower = TypeVar("Tower", bound=TowerConfig)


@dataclass(frozen=True)
class QwenSpec(MergedPatchSpec, Generic[Tower]):
    """models.spec.ModelSpec, and the validated parts of config.json for the network. A family adds `read`."""

    takes_videos: ClassVar[bool] = False
    """Whether the family's videos are served."""

    divides_videos: ClassVar[bool] = False
    """Whether there is text between the groups of a video's frames, so that each has the positions of an image."""

    text: QwenTextConfig
    vision: Tower
    placeholder_of: Mapping[str, int]
    placeholder_token_ids: tuple[int, ...]

    @classmethod
    def checked(cls, config: Mapping[str, Any], text: QwenTextConfig, vision: Tower) -> Self:
        """Return the spec of both halves and of the ids in config.json. Raises StartupError, naming the key."""
        if vision.out_hidden_size != text.hidden_size:
            raise StartupError("config.json: the vision tower's `out_hidden_size` must equal the text `hidden_size`.")
        if vision.num_features > 1 + text.num_layers:
            raise StartupError("config.json: more `deepstack_visual_indexes` than text layers.")
        image_token_id, video_token_id = (integer(config, f"{kind}_token_id", least=0) for kind in (IMAGE, VIDEO))
        placeholders = (image_token_id, video_token_id)
        if max(placeholders) >= text.vocab_size:
            raise StartupError("config.json: `image_token_id` and `video_token_id` must be below `vocab_size`.")
        videos = {VIDEO: video_token_id} if cls.takes_videos else {}
        return cls(text, vision, {IMAGE: image_token_id, **videos}, placeholders)

    def pixel_shape(self, grid: Grid) -> tuple[int, ...]:
        """Return (patches, values per patch)."""
        return prod(grid), self.vision.patch_values

    def video_pixel_shape(self, grid: Grid) -> tuple[int, ...]:
        """Return (patches, values per patch of all frames of its group)."""
        return prod(grid), self.vision.patch_values * self.vision.temporal_patch_size

    def encoder_output_values(self, grid: Grid, original_size: Size | None = None) -> int:
        """Return the number of values: for each token, one vector of the last block and of each deepstack block."""
        return self.item_tokens(grid, original_size) * self.vision.out_hidden_size * self.vision.num_features

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

"""The facts of Qwen's models for the engine's core. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Generic, Self, TypeVar

from saccade.errors import StartupError
from saccade.models.backbones.model_config import integer
from saccade.models.backbones.qwen_config import TextConfig, TowerConfig
from saccade.models.backbones.shared_facts import MergedPatchFacts
from saccade.models.facts import Grid, Size
from saccade.models.positions import MultimodalPositions

Tower = TypeVar("Tower", bound=TowerConfig)


@dataclass(frozen=True)
class QwenFacts(MergedPatchFacts, Generic[Tower]):
    """models.facts.ModelFacts, and the validated parts of config.json for the network. A family adds `read`."""

    text: TextConfig
    vision: Tower
    placeholder_of: Mapping[str, int]
    placeholder_token_ids: tuple[int, ...]

    @classmethod
    def checked(cls, config: Mapping[str, Any], text: TextConfig, vision: Tower) -> Self:
        """Return the facts of both halves and of the ids in config.json. Raises StartupError, naming the key."""
        if vision.out_hidden_size != text.hidden_size:
            raise StartupError("config.json: the vision tower's `out_hidden_size` must equal the text `hidden_size`.")
        if vision.num_features > 1 + text.num_layers:
            raise StartupError("config.json: more `deepstack_visual_indexes` than text layers.")
        image_token_id = integer(config, "image_token_id", least=0)
        placeholders = (image_token_id, integer(config, "video_token_id", least=0))
        if max(placeholders) >= text.vocab_size:
            raise StartupError("config.json: `image_token_id` and `video_token_id` must be below `vocab_size`.")
        return cls(text, vision, {"image": image_token_id}, placeholders)

    def pixel_shape(self, grid: Grid) -> tuple[int, ...]:
        """Return (patches, values per patch)."""
        return prod(grid), self.vision.patch_values

    def encoding_values(self, grid: Grid, original_size: Size | None = None) -> int:
        """Return the number of values: for each token, one vector of the last block and of each deepstack block."""
        return self.item_tokens(grid, original_size) * self.vision.out_hidden_size * self.vision.num_features

    def positions(self, spans: Sequence[tuple[int, Grid]]) -> MultimodalPositions:
        """Return positions in which a picture's tokens lie on the merged grid."""
        merge = self.vision.merge_size
        return MultimodalPositions([(start, (t, h // merge, w // merge)) for start, (t, h, w) in spans])

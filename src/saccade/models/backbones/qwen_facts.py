"""The facts of Qwen's models for the engine's core. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isqrt, prod
from typing import Any, Generic, Self, TypeVar

from saccade.errors import InvalidValue, StartupError
from saccade.models.backbones.model_config import integer
from saccade.models.backbones.qwen_config import TextConfig, TowerConfig
from saccade.models.facts import Grid, KvSpec, Paged, Size
from saccade.models.positions import MultimodalPositions

Tower = TypeVar("Tower", bound=TowerConfig)


@dataclass(frozen=True)
class QwenFacts(Generic[Tower]):
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

    @property
    def kv_specs(self) -> tuple[KvSpec, ...]:
        """Return paged attention for every layer."""
        width = self.text.head_dim
        return (Paged(self.text.num_kv_heads, width, width),) * self.text.num_layers

    @property
    def vocab_size(self) -> int:
        """Number of rows of the embedding."""
        return self.text.vocab_size

    @property
    def max_position_embeddings(self) -> int:
        """The model's longest sequence, in tokens."""
        return self.text.max_position_embeddings

    def item_tokens(self, grid: Grid, original_size: Size | None = None) -> int:
        """Return one token for every merged square of patches. Raises InvalidValue for a grid that cannot be merged."""
        frames, height, width = grid
        merge = self.vision.merge_size
        if frames != 1 or min(height, width) < 1 or height % merge or width % merge:
            raise InvalidValue(
                f"A picture's grid must be one frame of rows and columns that are multiples of {merge}, "
                f"not {tuple(grid)}."
            )
        return height * width // merge**2

    def pixel_shape(self, grid: Grid) -> tuple[int, ...]:
        """Return (patches, values per patch)."""
        return prod(grid), self.vision.patch_values

    def encode_cost(self, grid: Grid) -> int:
        return prod(grid)

    def encoding_values(self, grid: Grid, original_size: Size | None = None) -> int:
        """Return the number of values: for each token, one vector of the last block and of each deepstack block."""
        return self.item_tokens(grid, original_size) * self.vision.out_hidden_size * self.vision.num_features

    def square_grid(self, max_patches: int) -> Grid:
        """Return a square of whole merged squares."""
        merge = self.vision.merge_size
        side = max(merge, isqrt(max_patches) // merge * merge)
        return 1, side, side

    def padding_grid(self, num_patches: int) -> Grid:
        """Return one row of merged squares."""
        merge = self.vision.merge_size
        return 1, merge, num_patches // merge

    def positions(self, spans: Sequence[tuple[int, Grid]]) -> MultimodalPositions:
        """Return positions in which a picture's tokens lie on the merged grid."""
        merge = self.vision.merge_size
        return MultimodalPositions([(start, (t, h // merge, w // merge)) for start, (t, h, w) in spans])

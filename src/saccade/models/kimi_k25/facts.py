"""The facts of Kimi-K2.5 for the engine's core, from its configuration. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isqrt, prod
from typing import Any

from saccade.errors import InvalidValue, StartupError
from saccade.models.backbones.deepseek_config import TextConfig
from saccade.models.backbones.model_config import section
from saccade.models.backbones.moonvit_config import VisionConfig
from saccade.models.facts import Grid, KvSpec, Size
from saccade.models.kimi_k25 import FAMILY
from saccade.models.positions import PlainPositions
from saccade.models.preprocessing.processor_config import CHANNELS


@dataclass(frozen=True)
class Facts:
    """models.facts.ModelFacts, and the validated parts of config.json for the network."""

    text: TextConfig
    vision: VisionConfig
    placeholder_of: Mapping[str, int]
    placeholder_token_ids: tuple[int, ...]

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "Facts":
        """Read config.json. Raises StartupError, naming the key."""
        text = TextConfig.read(section(config, "text_config"))
        vision = VisionConfig.read(config, section(config, "vision_config"), text.hidden_size)
        placeholder = FAMILY.placeholder_token_id(config)
        if placeholder is None or placeholder >= text.vocab_size:
            raise StartupError(
                f"config.json: `{FAMILY.placeholder_keys[0]}` must be a token id below `vocab_size` "
                f"({text.vocab_size}), not {placeholder!r}."
            )
        return cls(text, vision, {"image": placeholder}, (placeholder,))

    @property
    def kv_specs(self) -> tuple[KvSpec, ...]:
        """Return latent attention for every layer."""
        return self.text.kv_specs

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
        frames, rows, columns = grid
        merge = self.vision.merge_size
        if frames != 1 or min(rows, columns) < 1 or rows % merge or columns % merge:
            raise InvalidValue(
                f"A picture's grid must be one frame of rows and columns that are multiples of {merge}, "
                f"not {tuple(grid)}."
            )
        return rows * columns // merge**2

    def pixel_shape(self, grid: Grid) -> tuple[int, ...]:
        """Return (patches, channels, height, width)."""
        return prod(grid), CHANNELS, self.vision.patch_size, self.vision.patch_size

    def encode_cost(self, grid: Grid) -> int:
        return prod(grid)

    def encoding_values(self, grid: Grid, original_size: Size | None = None) -> int:
        """Return the number of values: one vector of the text's width for each token."""
        return self.item_tokens(grid, original_size) * self.vision.out_hidden_size

    def square_grid(self, max_patches: int) -> Grid:
        """Return a square of whole merged squares."""
        merge = self.vision.merge_size
        side = max(merge, isqrt(max_patches) // merge * merge)
        return 1, side, side

    def padding_grid(self, num_patches: int) -> Grid:
        """Return one row of merged squares."""
        merge = self.vision.merge_size
        return 1, merge, num_patches // merge

    def positions(self, spans: Sequence[tuple[int, Grid]]) -> PlainPositions:
        """Return positions that count all tokens."""
        return PlainPositions()

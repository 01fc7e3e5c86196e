"""The spec for the engine's core, read from config.json. Does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from saccade.errors import InvalidValue
from saccade.models.backbones.model_config import section
from saccade.models.backbones.text_config import TIED, text_section
from saccade.models.backbones.tiled_spec import TiledSpec
from saccade.models.backbones.windowed_config import WindowedConfig
from saccade.models.gemma3 import FAMILY
from saccade.models.gemma3.settings import tokens_per_image, tower
from saccade.models.spec import IMAGE, Grid

DEFAULT_IMAGE_TOKEN_ID = 262_144
"""The default of transformers' Gemma3Config."""


@dataclass(frozen=True)
class Spec(TiledSpec):
    """Implements models.spec.ModelSpec, and holds the network's checked settings from config.json.

    An image is one view.
    """

    text: WindowedConfig

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> "Spec":
        """Read config.json. Raises a StartupError that names the key."""
        section(config, "text_config")
        text, vision = WindowedConfig.read_decoder(text_section({**TIED, **config})), tower(config)
        token_id = FAMILY.placeholder_below(config, text.vocab_size, DEFAULT_IMAGE_TOKEN_ID)
        scale = vision.side // round(tokens_per_image(config, vision) ** 0.5)
        return cls(text, vision, scale, {IMAGE: token_id})

    @property
    def num_tokens(self) -> int:
        """The number of tokens in an image."""
        return (self.vision.side // self.scale) ** 2

    @property
    def longest_whole(self) -> int:
        """The number of an image's tokens, which see each other."""
        return self.num_tokens

    def span_lengths(self, grid: Grid, modality: str) -> tuple[int, ...]:
        """Return the length of an image's run of placeholders."""
        return (self.num_tokens,)

    def num_views(self, grid: Grid) -> int:
        """Return 1. Raises InvalidValue unless the grid is the one that all images have."""
        side = self.vision.side
        if tuple(grid) != (1, side, side):
            raise InvalidValue(
                f"An image's grid must be one frame of {side} rows and {side} columns, not {tuple(grid)}."
            )
        return 1

    def square_grid(self, max_patches: int) -> Grid:
        """Return the grid that all images have."""
        return 1, self.vision.side, self.vision.side

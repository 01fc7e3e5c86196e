"""The spec for the engine's core, read from config.json. Does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

from saccade.models.backbones.model_config import choice, part
from saccade.models.backbones.text_config import QWEN2, QWEN3, QWEN3_MOE, TIED, TextConfig, TextStyle, text_section
from saccade.models.backbones.tiled_spec import TiledSpec
from saccade.models.internvl import FAMILY
from saccade.models.internvl.settings import is_chat, scale, tower
from saccade.models.spec import IMAGE, VIDEO, Grid

STYLES: Mapping[str, TextStyle] = MappingProxyType({"qwen2": QWEN2, "qwen3": QWEN3, "qwen3_moe": QWEN3_MOE})
"""Text networks by their model_type."""


@dataclass(frozen=True)
class Spec(TiledSpec):
    """Implements models.spec.ModelSpec, and holds the network's checked settings from config.json."""

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> Self:
        """Read config.json. Raises a StartupError that names the key."""
        if is_chat(config):
            keys = text_section({**config, "text_config": part(config, "llm_config")})
        else:
            keys = text_section({**TIED, **config, "text_config": part(config, "text_config")})
        text = TextConfig.read_decoder(
            keys, STYLES[choice({"model_type": "qwen2", **keys}, "model_type", tuple(STYLES))]
        )
        vision = tower(config)
        token_id = FAMILY.placeholder_below(config, text.vocab_size)
        return cls(text, vision, scale(config, vision), {IMAGE: token_id, VIDEO: token_id})

    def num_views(self, grid: Grid) -> int:
        """Return the number of square views: an image's views, or a video's frames. Raises InvalidValue."""
        frames, rows, columns = grid
        return frames if frames > 1 and rows == columns == self.vision.side else super().num_views(grid)

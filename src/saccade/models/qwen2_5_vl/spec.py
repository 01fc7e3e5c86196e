"""The spec of Qwen2.5-VL for the engine's core, from its configuration. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from saccade.errors import StartupError
from saccade.models.backbones.model_config import integer, number, section
from saccade.models.backbones.qwen_config import BIASED_STYLE, QwenTextConfig, TowerConfig, text_section
from saccade.models.backbones.qwen_spec import QwenSpec
from saccade.models.spec import VIDEO
from saccade.protocol.media import MediaItem

TOWER_DEFAULTS: Mapping[str, Any] = {"hidden_act": "silu", "in_channels": 3, "tokens_per_second": 4}
"""Keys that the releases leave out: transformers 5.23, Qwen2_5_VLVisionConfig."""


@dataclass(frozen=True)
class WindowedConfig(TowerConfig):
    """A tower whose blocks attend within windows of window * window merged patches, except for *full_blocks*.

    Positions of a video's groups of frames are its seconds, times *tokens_per_second*.
    """

    window: int
    full_blocks: frozenset[int]
    tokens_per_second: float

    @classmethod
    def more(cls, vision: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that this tower adds. Raises StartupError, naming the key."""
        merged = integer(vision, "spatial_merge_size") * integer(vision, "patch_size")
        window = integer(vision, "window_size", least=merged) // merged
        rate = number(vision, "tokens_per_second")
        return {"window": window, "full_blocks": _full_blocks(vision), "tokens_per_second": rate}


class Spec(QwenSpec[WindowedConfig]):
    """models.spec.ModelSpec."""

    takes_videos = True

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "Spec":
        """Read config.json. Raises StartupError, naming the key."""
        text = QwenTextConfig.read(text_section(config), BIASED_STYLE)
        tower = WindowedConfig.read({**TOWER_DEFAULTS, **section(config, "vision_config")})
        return cls.checked(config, text, tower)

    def time_step(self, item: MediaItem) -> float:
        """Return the distance of the positions of successive groups: one second, if the item has none."""
        seconds = 1.0 if item.seconds_per_group is None else item.seconds_per_group
        return float(np.float32(self.vision.tokens_per_second) * np.float32(seconds)) if item.modality == VIDEO else 1.0


def _full_blocks(vision: Mapping[str, Any]) -> frozenset[int]:
    blocks, depth = vision.get("fullatt_block_indexes"), integer(vision, "depth")
    if not isinstance(blocks, list) or not all(isinstance(block, int) and 0 <= block < depth for block in blocks):
        raise StartupError(
            f"config.json: `fullatt_block_indexes` must list blocks of the vision tower (0 to {depth - 1}), "
            f"not {blocks!r}."
        )
    return frozenset(blocks)

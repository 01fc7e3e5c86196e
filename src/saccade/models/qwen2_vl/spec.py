"""The spec of Qwen2-VL for the engine's core, from its configuration. No torch."""

from collections.abc import Mapping
from typing import Any

from saccade.models.backbones.model_config import integer, section
from saccade.models.backbones.qwen_config import BIASED_STYLE, QwenTextConfig, TowerConfig, text_section
from saccade.models.backbones.qwen_spec import QwenSpec

TOWER_DEFAULTS: Mapping[str, Any] = {"mlp_ratio": 4, "hidden_act": "quick_gelu", "in_channels": 3}
"""Keys that the releases leave out: transformers 5.23, Qwen2VLVisionConfig."""


class Spec(QwenSpec[TowerConfig]):
    """models.spec.ModelSpec."""

    takes_videos = True

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "Spec":
        """Read config.json. Raises StartupError, naming the key."""
        text = QwenTextConfig.read(text_section(config), BIASED_STYLE)
        return cls.checked(config, text, _tower(section(config, "vision_config")))


def _tower(vision: Mapping[str, Any]) -> TowerConfig:
    """Read `vision_config`: `embed_dim` is the width of the tower, and `hidden_size` that of its features."""
    keys = {**TOWER_DEFAULTS, **vision}
    width = integer(keys, "embed_dim")
    widths = {
        "hidden_size": width,
        "intermediate_size": width * integer(keys, "mlp_ratio"),
        "out_hidden_size": integer(keys, "hidden_size"),
    }
    return TowerConfig.read({**keys, **widths})

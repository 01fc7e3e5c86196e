"""The spec of Qwen3-VL for the engine's core, from its configuration. No torch."""

from collections.abc import Mapping
from typing import Any

from saccade.models.backbones.model_config import section
from saccade.models.backbones.qwen_config import QwenTextConfig, VisionConfig
from saccade.models.backbones.qwen_spec import QwenSpec


class Spec(QwenSpec[VisionConfig]):
    """models.spec.ModelSpec of a dense model, or of one with experts."""

    takes_videos = True
    divides_videos = True

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "Spec":
        """Read config.json. Raises StartupError, naming the key."""
        text = QwenTextConfig.read(section(config, "text_config"))
        return cls.checked(config, text, VisionConfig.read(section(config, "vision_config")))

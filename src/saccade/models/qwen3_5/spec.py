"""The spec of Qwen3.5 for the engine's core, from its configuration. No torch."""

from collections.abc import Mapping
from typing import Any

from saccade.errors import StartupError
from saccade.models.backbones.hybrid_config import HybridConfig
from saccade.models.backbones.model_config import section
from saccade.models.backbones.qwen_config import VisionConfig
from saccade.models.backbones.qwen_spec import QwenSpec

DEEPSTACK = "deepstack_visual_indexes"


class Spec(QwenSpec[VisionConfig]):
    """models.spec.ModelSpec of a dense model, or of one with experts."""

    takes_videos = True
    divides_videos = True

    text: HybridConfig

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "Spec":
        """Read config.json. Raises StartupError, naming the key."""
        text = HybridConfig.of(section(config, "text_config"))
        # The releases list no blocks, and the reference does not read the key, which may be absent.
        vision = VisionConfig.read({DEEPSTACK: [], **section(config, "vision_config")})
        if vision.deepstack_layers:
            raise StartupError(f"config.json: `{DEEPSTACK}` must be empty: this network has no deepstack.")
        return cls.checked(config, text, vision)

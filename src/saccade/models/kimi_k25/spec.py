"""The spec of Kimi-K2.5 for the engine's core, from its configuration. Does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from saccade.models.backbones.deepseek_config import DeepseekTextConfig
from saccade.models.backbones.grid_spec import MergedPatchSpec
from saccade.models.backbones.model_config import part
from saccade.models.backbones.moonvit_config import MoonVitConfig
from saccade.models.backbones.text_config import DEEPSEEK, TIED, text_section
from saccade.models.kimi_k25 import FAMILY
from saccade.models.preprocessing.processor_config import CHANNELS
from saccade.models.spec import IMAGE, VIDEO, Grid, Size


@dataclass(frozen=True)
class Spec(MergedPatchSpec):
    """Implements models.spec.ModelSpec, and holds the network's checked settings from config.json."""

    text: DeepseekTextConfig
    vision: MoonVitConfig
    placeholder_of: Mapping[str, int]

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> "Spec":
        """Read config.json. Raises a StartupError that names the key."""
        text = DeepseekTextConfig.read_decoder(text_section({**TIED, **config}), DEEPSEEK)
        vision = MoonVitConfig.read_vision(config, part(config, "vision_config"), text.hidden_size)
        placeholder = FAMILY.placeholder_below(config, text.vocab_size)
        return cls(text, vision, {IMAGE: placeholder, VIDEO: placeholder})

    def item_tokens(self, grid: Grid, original_size: Size | None = None) -> int:
        """Return the number of tokens; a clip has as many as one frame. Raises InvalidValue as for other families."""
        of_a_frame = super().item_tokens(grid, original_size) // grid[0]
        return of_a_frame * ceil(grid[0] / self.vision.clip_frames)

    @property
    def joint_frames(self) -> int:
        """The number of frames in a clip."""
        return self.vision.clip_frames

    def pixel_shape(self, grid: Grid, modality: str = IMAGE) -> tuple[int, ...]:
        """Return (patches of all frames, channels, height, width)."""
        return prod(grid), CHANNELS, self.vision.patch_size, self.vision.patch_size

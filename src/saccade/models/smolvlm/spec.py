"""The spec of Idefics3 and SmolVLM for the engine's core, from their configuration. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

from saccade.errors import InvalidValue
from saccade.models.backbones.clip_config import ClipConfig
from saccade.models.backbones.model_config import choice, section
from saccade.models.backbones.text_config import LLAMA, TextConfig
from saccade.models.preprocessing.processor_config import CHANNELS
from saccade.models.smolvlm import FAMILY
from saccade.models.smolvlm.layout import num_views
from saccade.models.smolvlm.settings import scale, tower
from saccade.models.spec import IMAGE, Grid, ModelSpec, Size

DEFAULT_IMAGE_TOKEN_ID = 128257


@dataclass(frozen=True)
class Spec(ModelSpec):
    """models.spec.ModelSpec, and the validated parts of config.json for the network.

    *scale* x *scale* patches become one token.
    """

    text: TextConfig
    vision: ClipConfig
    scale: int
    placeholder_of: Mapping[str, int]

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "Spec":
        """Read config.json. Raises StartupError, naming the key."""
        text, vision = _text(config), tower(config)
        token_id = FAMILY.placeholder_below(config, text.vocab_size, DEFAULT_IMAGE_TOKEN_ID)
        return cls(text, vision, scale(config, vision), {"image": token_id})

    def item_tokens(self, grid: Grid, original_size: Size | None = None) -> int:
        """Return the tokens of all views. Raises InvalidValue for a grid that does not consist of whole tiles."""
        return self.num_views(grid) * (self.vision.side // self.scale) ** 2

    def num_views(self, grid: Grid) -> int:
        """Return the number of square views. Raises InvalidValue for a grid that does not consist of whole tiles."""
        frames, rows, columns = grid
        side = self.vision.side
        if frames != 1 or min(rows, columns) < 1 or rows % side or columns % side:
            raise InvalidValue(
                f"An image's grid must be one frame of rows and columns that are multiples of {side}, not "
                f"{tuple(grid)}."
            )
        return num_views(rows // side, columns // side)

    def pixel_shape(self, grid: Grid, modality: str = IMAGE) -> tuple[int, ...]:
        """Return the shape of the views."""
        return self.num_views(grid), CHANNELS, self.vision.image_size, self.vision.image_size

    def encode_cost(self, grid: Grid) -> int:
        """Return the number of patches of all views."""
        return self.num_views(grid) * self.vision.num_patches

    def square_grid(self, max_patches: int) -> Grid:
        """Return a square of tiles that leaves room for the view of the whole image."""
        side = max(1, isqrt(max(0, max_patches // self.vision.num_patches - 1))) * self.vision.side
        return 1, side, side


def _text(config: Mapping[str, Any]) -> TextConfig:
    """Read the text half. The top level decides whether the head is tied; the norms' epsilon defaults to 1e-5."""
    text = {"rms_norm_eps": 1e-5} if config.get("text_config") is None else section(config, "text_config")
    choice({"model_type": "llama", **text}, "model_type", ("llama",))
    tied = bool(config.get("tie_word_embeddings", False))
    return TextConfig.read({**text, "tie_word_embeddings": tied}, LLAMA)

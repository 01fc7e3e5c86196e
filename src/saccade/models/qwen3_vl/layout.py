"""Grid, token count and placeholder of a picture, from its dimensions. Runs in the gateway: no torch."""

from collections.abc import Mapping
from typing import Any

from saccade.errors import StartupError
from saccade.models.preprocessing import merge_blocks
from saccade.protocol.media import PictureLayout

PLACEHOLDER_KEY = "image_token_id"
TOWER_KEYS = (
    ("patch_size", "patch_size"),
    ("spatial_merge_size", "merge_size"),
    ("temporal_patch_size", "temporal_patch_size"),
)


class Layout:
    """Counts of Qwen3-VL: patches of 16 x 16, merged 2 x 2 into one token; sizes follow merge_blocks.resized."""

    def __init__(self, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> None:
        self.placeholder_token_id = _placeholder(config)
        self.settings: Mapping[str, Any] = merge_blocks.resolve(preprocessor)
        vision = config.get("vision_config", {})
        for key, setting in TOWER_KEYS:
            if vision.get(key, self.settings[setting]) != self.settings[setting]:
                raise StartupError(
                    f"config.json says vision_config.{key} is {vision[key]!r}, but preprocessor_config.json cuts "
                    f"pictures with {setting} {self.settings[setting]!r}."
                )

    def picture(self, width: int, height: int) -> PictureLayout:
        """Return grid (1, rows, columns), tokens and patch shape. Raises ImageTooLarge."""
        return merge_blocks.picture_layout(width, height, self.settings)


def _placeholder(config: Mapping[str, Any]) -> int:
    token_id = config.get(PLACEHOLDER_KEY)
    if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
        raise StartupError(
            f"config.json needs {PLACEHOLDER_KEY}, the id of <|image_pad|>, as a whole number; it has {token_id!r}."
        )
    return token_id

"""Grid and token count of a picture, from its dimensions. Runs in the gateway: no torch."""

from collections.abc import Mapping
from typing import Any

from saccade.errors import StartupError
from saccade.models.family import PictureOptions
from saccade.models.preprocessing import merge_blocks
from saccade.protocol.media import PictureLayout

TOWER_KEYS = (
    ("patch_size", "patch_size"),
    ("spatial_merge_size", "merge_size"),
    ("temporal_patch_size", "temporal_patch_size"),
)


class Layout:
    """Counts of Qwen3-VL: patches of 16 x 16, merged 2 x 2 into one token; sizes follow merge_blocks.resized."""

    def __init__(self, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> None:
        self.settings: Mapping[str, Any] = merge_blocks.resolve(preprocessor)
        vision = config.get("vision_config", {})
        for key, setting in TOWER_KEYS:
            if vision.get(key, self.settings[setting]) != self.settings[setting]:
                raise StartupError(
                    f"config.json says vision_config.{key} is {vision[key]!r}, but preprocessor_config.json cuts "
                    f"pictures with {setting} {self.settings[setting]!r}."
                )

    def settings_for(self, options: PictureOptions) -> Mapping[str, Any]:
        """Return `settings` with the limits that *options* set. Raises InvalidValue."""
        return merge_blocks.adjusted(self.settings, options)

    def picture(self, width: int, height: int, settings: Mapping[str, Any]) -> PictureLayout:
        """Return grid (1, rows, columns), tokens and patch shape. Raises ImageTooLarge."""
        return merge_blocks.picture_layout(width, height, settings)

    def foreign(self, layout: PictureLayout, dtype: str) -> PictureLayout:
        """Return *layout* with each patch's frame doubled, as the reference processor has it."""
        return merge_blocks.foreign(layout, self.settings, dtype)

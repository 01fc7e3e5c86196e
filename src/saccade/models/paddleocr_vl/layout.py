"""Computes an image's grid and token count from its dimensions. Runs in the gateway, without torch."""

from collections.abc import Mapping
from typing import Any, ClassVar

from saccade.models.preprocessing.own_wire import OwnWireLayout
from saccade.models.preprocessing.processor_config import CLIP_COLOURS
from saccade.models.preprocessing.smart_resize import SmartResizeLayout, check_aspect, image_layout
from saccade.protocol.media import ImageLayout


class Layout(OwnWireLayout, SmartResizeLayout):
    """By default, 2 x 2 patches of 14 x 14 pixels, each in one frame, become one token."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "patch_size": 14,
        "temporal_patch_size": 1,
        "merge_size": 2,
        **CLIP_COLOURS,
        "min_pixels": 384 * 384,
        "max_pixels": 1536 * 1536,
    }
    """Defaults of the reference processor for missing keys: transformers 5.23, PaddleOCRVLImageProcessor."""

    def __init__(self, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> None:
        # Releases have a temporal_patch_size of 2 here, which nothing reads: the tower has no time.
        vision = {**(config.get("vision_config") or {}), "temporal_patch_size": 1}
        super().__init__({**config, "vision_config": vision}, preprocessor)

    @staticmethod
    def image(width: int, height: int, settings: Mapping[str, Any]) -> ImageLayout:
        """Return the layout of an image; one with a side below a token's is enlarged first. Raises ImageTooLarge."""
        check_aspect(width, height)
        factor = settings["patch_size"] * settings["merge_size"]
        if height < factor:
            width, height = round(width * factor / height), factor
        if width < factor:
            width, height = factor, round(height * factor / width)
        return image_layout(width, height, settings)

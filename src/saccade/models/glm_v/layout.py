"""Computes an image's grid and token count from its dimensions. Runs in the gateway, without torch."""

from collections.abc import Mapping
from typing import Any, ClassVar

from saccade.models.preprocessing.own_wire import OwnWireLayout
from saccade.models.preprocessing.processor_config import CLIP_COLOURS
from saccade.models.preprocessing.smart_resize import SmartResizeLayout, image_layout
from saccade.protocol.media import ImageLayout

PATCHES: Mapping[str, Any] = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, **CLIP_COLOURS}


class Layout(OwnWireLayout, SmartResizeLayout):
    """By default, 2 x 2 patches of 14 x 14 pixels become one token. An image counts as a video of two frames."""

    defaults: ClassVar[Mapping[str, Any]] = {**PATCHES, "min_pixels": 112 * 112, "max_pixels": 28 * 28 * 15000}
    """Defaults of the reference processor for missing keys: transformers 5.23, Glm4vImageProcessor."""
    limits_outside_size: ClassVar[bool] = False

    @staticmethod
    def image(width: int, height: int, settings: Mapping[str, Any]) -> ImageLayout:
        """Return the layout of an image; one with a side below a token's is enlarged first. Raises ImageTooLarge.

        Pixel limits count all frames of a patch together.
        """
        factor = settings["patch_size"] * settings["merge_size"]
        if min(width, height) < factor:
            scale = max(factor / height, factor / width)
            width, height = int(width * scale), int(height * scale)
        limits = {key: settings[key] / settings["temporal_patch_size"] for key in ("min_pixels", "max_pixels")}
        return image_layout(width, height, {**settings, **limits})

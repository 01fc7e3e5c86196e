"""Computes an image's grid and token count from its dimensions. Runs in the gateway, without torch."""

from collections.abc import Mapping
from typing import Any, ClassVar

from saccade.models.preprocessing.processor_config import CLIP_COLOURS, HALF_COLOURS
from saccade.models.preprocessing.smart_resize import SmartResizeLayout

PATCHES_14: Mapping[str, Any] = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, **CLIP_COLOURS}
PATCHES_16: Mapping[str, Any] = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, **HALF_COLOURS}


class Layout14(SmartResizeLayout):
    """By default, 2 x 2 patches of 14 x 14 pixels become one token."""

    defaults: ClassVar[Mapping[str, Any]] = {**PATCHES_14, "min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280}
    """Defaults of the processor of all releases for missing keys: transformers 5.23, Qwen2VLImageProcessor."""


class Layout16(Layout14):
    """By default, 2 x 2 patches of 16 x 16 pixels become one token."""

    defaults: ClassVar[Mapping[str, Any]] = {**Layout14.defaults, "patch_size": 16}

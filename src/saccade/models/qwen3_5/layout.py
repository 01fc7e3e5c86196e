"""Grid and token count of an image, from its dimensions. Runs in the gateway: no torch."""

from collections.abc import Mapping
from typing import Any, ClassVar

from saccade.models.preprocessing.smart_resize import SmartResizeLayout


class Layout(SmartResizeLayout):
    """Patches of 16 x 16, merged 2 x 2 into one token; 64 to 16384 tokens an image."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": 256 * 256,
        "max_pixels": 4096 * 4096,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    """The values of the releases' preprocessor_config.json, which apply to missing keys."""

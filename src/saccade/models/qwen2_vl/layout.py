"""Grid and token count of an image, from its dimensions. Runs in the gateway: no torch."""

from collections.abc import Mapping
from typing import Any, ClassVar

from saccade.models.preprocessing.smart_resize import SmartResizeLayout


class Layout(SmartResizeLayout):
    """Patches of 14 x 14, merged 2 x 2 into one token."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": 56 * 56,
        "max_pixels": 28 * 28 * 1280,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    """Defaults of the reference processor for missing keys: transformers 5.23, Qwen2VLImageProcessor."""

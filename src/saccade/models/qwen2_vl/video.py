"""Frames, grid and token count of a video, from its header. Runs in the gateway: no torch."""

from collections.abc import Mapping
from typing import Any, ClassVar

from saccade.models.preprocessing.smart_video import SmartVideoLayout


class VideoLayout(SmartVideoLayout):
    """Patches of two frames of 14 x 14, merged 2 x 2 into one token; two frames a second, of 128 to 768 tokens each."""

    template_tokens = ("<|video_pad|>",)
    defaults: ClassVar[Mapping[str, Any]] = {
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": 128 * 28 * 28,
        "max_pixels": 768 * 28 * 28,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "fps": 2.0,
        "min_frames": 4,
        "max_frames": 768,
        "max_video_tokens": 128_000,
    }
    """Defaults of the reference processor, Qwen2VLVideoProcessor of transformers 5.23; its `fps` is the release's."""

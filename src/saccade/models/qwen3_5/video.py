"""Frames, grid, token count and prompt of a video, from its header. Runs in the gateway: no torch."""

from collections.abc import Mapping
from typing import Any, ClassVar

from saccade.models.preprocessing.timed_video import TimedVideoLayout


class VideoLayout(TimedVideoLayout):
    """Patches of two frames of 16 x 16, merged 2 x 2 into one token; two frames a second, each pair with its time."""

    around = ("<|vision_start|>", "<|vision_end|>")
    template_tokens = ("<|vision_start|>", "<|video_pad|>", "<|vision_end|>")
    defaults: ClassVar[Mapping[str, Any]] = {
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": 4096,
        "max_pixels": 25_165_824,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "fps": 2.0,
        "min_frames": 4,
        "max_frames": 768,
        "cap_pixels_per_frame": False,
        "max_video_tokens": 768,
    }
    """Defaults of the reference processor for videos (transformers 5.23); the limits of pixels are the releases'."""

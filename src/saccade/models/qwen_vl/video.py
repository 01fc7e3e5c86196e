"""Computes a video's frames, grid, token count and prompt from its header. Runs in the gateway, without torch."""

from collections.abc import Mapping
from typing import Any, ClassVar

from saccade.models.preprocessing.smart_video import SmartVideoLayout
from saccade.models.preprocessing.timed_video import TimedVideoLayout
from saccade.models.qwen_vl.layout import PATCHES_14, PATCHES_16

FRAMES: Mapping[str, Any] = {"fps": 2.0, "min_frames": 4, "max_frames": 768}


class VideoLayout14(SmartVideoLayout):
    """By default, a patch spans 14 x 14 pixels and two frames, and 2 x 2 patches become one token.

    Also by default, two frames a second are sampled, and each pair has 128 to 768 tokens.
    """

    template_tokens = ("<|video_pad|>",)
    defaults: ClassVar[Mapping[str, Any]] = {
        **PATCHES_14,
        **FRAMES,
        "min_pixels": 128 * 28 * 28,
        "max_pixels": 768 * 28 * 28,
        "max_video_tokens": 128_000,
    }
    """Defaults of the reference processor, Qwen2VLVideoProcessor of transformers 5.23; its `fps` is the releases'."""


class VideoLayout16(TimedVideoLayout):
    """By default, a patch spans 16 x 16 pixels and two frames, and 2 x 2 patches become one token.

    Also by default, two frames a second are sampled. In the prompt, each pair follows its time.
    """

    around = ("<|vision_start|>", "<|vision_end|>")
    template_tokens = ("<|video_pad|>",)
    defaults: ClassVar[Mapping[str, Any]] = {
        **PATCHES_16,
        **FRAMES,
        "min_pixels": 4096,
        "max_pixels": 25_165_824,
        "cap_pixels_per_frame": False,
        "max_video_tokens": 768,
    }
    """Defaults of the reference processor for videos (transformers 5.23); the limits of pixels are the releases'."""

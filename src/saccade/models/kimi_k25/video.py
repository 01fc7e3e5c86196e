"""Computes a video's frames, grid, token count and prompt from its header. Runs in the gateway, without torch.

Source of the rules: the release's kimi_k25_vision_processing.py and media_utils.py; transformers 5.23 samples frames
by another rule, and has the rest in models/kimi_k25/video_processing_kimi_k25.py and processing_kimi_k25.py.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from saccade.errors import InvalidValue
from saccade.models.backbones.moonvit_config import DEFAULTS
from saccade.models.family import VideoOptions
from saccade.models.preprocessing import frames
from saccade.models.preprocessing.navit_layout import image_layout
from saccade.models.preprocessing.navit_settings import NESTED, resolve
from saccade.models.preprocessing.processor_config import check_fixed, check_tower, whole_number
from saccade.models.preprocessing.unserved_options import OF_VIDEOS, refuse
from saccade.protocol.media import ImageLayout, VideoHeader
from saccade.protocol.model_files import PREPROCESSOR_CONFIG

FIXED: Mapping[str, Any] = {
    **dict.fromkeys(("in_patch_limit_video", "max_num_frames_each_video", "num_frames")),
    "timestamp_mode": "hh:mm:ss.fff",
}
"""Settings with one supported value, or none."""

OF_PATCHES = ("patch_size", "merge_size", "image_mean", "image_std")
"""Settings that images and videos share, because one network reads the patches of both."""

EACH_FRAME = "in_patch_limit_each_frame"
SPELLINGS: Mapping[str, tuple[tuple[str, ...], Any]] = {
    "in_patch_limit": ((EACH_FRAME, "max_patches"), 4096),
    "fps": (("sample_fps", "fps"), 2.0),
    "clip_frames": (("temporal_merge_kernel_size", "temporal_patch_size"), DEFAULTS["pos_emb_time"]),
}
"""The release's key and that of transformers for a setting, and the release's value, for missing keys."""

PLACES = ("init_pos_emb_time", "pos_emb_time")
"""Keys of the vision tower's config.json for the frames of a clip."""


class VideoLayout:
    """The layout of Kimi-K2.5's videos. Each clip, by default of four frames, becomes its time and one frame's tokens.

    The grid counts frames. A frame's patches are like an image's, but by default the patch limit is lower.
    """

    template_tokens: ClassVar[tuple[str, ...]] = ("<|kimi_k25_video_placeholder|>",)

    def __init__(
        self, config: Mapping[str, Any], preprocessor: Mapping[str, Any], video_preprocessor: Mapping[str, Any]
    ) -> None:
        nested = preprocessor.get(NESTED) or {}
        options = {**nested, **video_preprocessor}
        if options.get(EACH_FRAME, options) is None:
            options[EACH_FRAME] = nested.get("in_patch_limit")  # as in the release
        of_videos = resolve(config, {**(nested or preprocessor), **video_preprocessor})
        self.settings: Mapping[str, Any] = {**of_videos, **{key: _setting(options, key) for key in SPELLINGS}}
        of_images = resolve(config, preprocessor)
        with frames.settings_for_videos(PREPROCESSOR_CONFIG):
            for key in ("in_patch_limit", "clip_frames"):
                whole_number(self.settings[key], SPELLINGS[key][0][0])
            frames.check_rate(self.settings["fps"], SPELLINGS["fps"][0][0])
            check_fixed(options, FIXED)
            frames.check_as_images(self.settings, {key: of_images[key] for key in OF_PATCHES})
            clip = SPELLINGS["clip_frames"][0][0]
            check_tower(config.get("vision_config"), {clip: self.settings["clip_frames"]}, dict.fromkeys(PLACES, clip))

    def settings_for(self, options: VideoOptions) -> Mapping[str, Any]:
        """Return `settings` changed by *options*. Raises InvalidValue."""
        refuse(options, *OF_VIDEOS)
        settings = dict(self.settings)
        patch_pixels = settings["patch_size"] ** 2
        if options.min_pixels is not None:
            raise InvalidValue("min_pixels: this model never enlarges a video; leave it out.", "mm_processor_kwargs")
        if options.max_pixels is not None:
            if options.max_pixels < patch_pixels:
                raise InvalidValue(f"max_pixels must be at least {patch_pixels}, one patch.", "mm_processor_kwargs")
            settings["in_patch_limit"] = min(settings["in_patch_limit"], options.max_pixels // patch_pixels)
        if options.num_frames is not None:
            settings["num_frames"] = options.num_frames
        elif options.fps is not None:
            settings["fps"] = options.fps
        return settings

    def video(self, header: VideoHeader, settings: Mapping[str, Any]) -> ImageLayout:
        """Return grid (frames, rows, columns), tokens, patch shape, the prompt and the frames."""
        indices = header.indices or _sampled(header, settings)
        one = image_layout(header.width, header.height, settings)
        prompt: list[str | int] = []
        for start in indices[:: settings["clip_frames"]]:
            prompt += [_time(start / header.fps), "<|media_begin|>", "video", "<|media_content|>"]
            prompt += [one.num_tokens, "<|media_end|>"]
        return frames.layout_of(one, indices, prompt)


def _sampled(header: VideoHeader, settings: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the indices of the frames to show to the model: evenly spread, including the first and the last."""
    total = header.num_frames
    if (num_frames := settings.get("num_frames")) is not None:
        count = min(num_frames, total)
    else:
        count = max(1, round(total * min(settings["fps"], header.fps) / header.fps))
    return tuple(np.linspace(0, total - 1, count).round().astype(int).tolist())


def _time(seconds: float) -> str:
    """Return *seconds* as a time of day in the release's form."""
    whole = int(seconds)
    return f"{whole // 3600 % 24:02}:{whole // 60 % 60:02}:{whole % 60:02}.{int(seconds % 1 * 1000):03}"


def _setting(options: Mapping[str, Any], setting: str) -> Any:
    keys, default = SPELLINGS[setting]
    return next((options[key] for key in keys if options.get(key) is not None), default)

"""Computes a video's frames, grid, token count and prompt from its header. Runs in the gateway, without torch.

Source of the rules: transformers 5.23, video_processing_glm4v.py and video_processing_glm46v.py, and the processors of
the same models.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from saccade.errors import InvalidValue
from saccade.models.family import VideoOptions
from saccade.models.glm_v.layout import PATCHES
from saccade.models.preprocessing.timed_video import TimedVideoLayout
from saccade.models.preprocessing.unserved_options import FRAMES, refuse
from saccade.protocol.media import VideoHeader

RATES = ((30, 3.0), (300, 1.0), (2400, 0.5))
"""The longest duration in seconds, and the pairs of frames a second of GLM-4.6V; longer videos count as the last."""

MOST_FRAMES = 640
CLASSES = ("processor_class", "video_processor_type")


class VideoLayout(TimedVideoLayout):
    """Patches span two frames. In the prompt, each pair's time follows its placeholders.

    A checkpoint names its processor's class, Glm4v's or Glm46V's, which sample frames and write times differently.
    """

    template_tokens = ("<|video|>",)
    around = ("<|begin_of_image|>", "<|end_of_image|>")
    fixed: ClassVar[Mapping[str, Any]] = {}
    defaults: ClassVar[Mapping[str, Any]] = {
        **PATCHES,
        "fps": 2.0,
        "max_duration": 300,
        "max_frames": MOST_FRAMES,
        "min_pixels": 112 * 112,
        "max_pixels": 28 * 28 * 2 * 30000,
        "cap_pixels_per_frame": False,
    }
    """Defaults of the reference processor, Glm4vVideoProcessor of transformers 5.23."""

    def __init__(
        self, config: Mapping[str, Any], preprocessor: Mapping[str, Any], video_preprocessor: Mapping[str, Any]
    ) -> None:
        super().__init__(config, preprocessor, video_preprocessor)
        names = [str(source.get(key)) for source in (video_preprocessor, preprocessor) for key in CLASSES]
        named = next((name for name in names if name.startswith("Glm4")), str(config.get("model_type")))
        self.settings = {**self.settings, "by_duration": named.lower().startswith("glm46v")}

    def settings_for(self, options: VideoOptions) -> Mapping[str, Any]:
        """Return `settings` changed by *options*. Raises InvalidValue."""
        refuse(options, *FRAMES)
        if options.fps is not None and self.settings["by_duration"]:
            raise InvalidValue(
                "`fps`: this model's processor chooses the rate by the video's duration; send `num_frames`, or leave "
                "it out.",
                "media_io_kwargs",
            )
        return super().settings_for(options)

    def sampled(self, header: VideoHeader, settings: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the indices of the frames to show to the model."""
        total = header.num_frames
        if settings.get("num_frames") is not None:
            return super().sampled(header, settings)
        if settings["by_duration"]:
            return _unique(_by_duration(total, header.fps))
        return _unique(_by_rate(total, header.fps, settings["fps"], settings["max_duration"]))

    def resized(self, header: VideoHeader, num_frames: int, settings: Mapping[str, Any]) -> tuple[int, int]:
        """Return (height, width) of the resized frames; the last one counts twice if their number is odd."""
        return super().resized(header, num_frames + num_frames % 2, settings)

    def prompt(
        self, frames: tuple[int, ...], header: VideoHeader, settings: Mapping[str, Any], group_tokens: int
    ) -> tuple[str | int, ...]:
        """Return, for each pair of frames, its placeholders and the time of its first frame."""
        before, after = self.around
        parts: list[str | int] = []
        for frame in frames[:: settings["temporal_patch_size"]]:
            seconds = frame / header.fps
            parts += [
                before,
                group_tokens,
                after,
                f"{seconds:.1f} seconds" if settings["by_duration"] else f"{int(seconds)}",
            ]
        return tuple(parts)


def _unique(frames: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(frames))


def _by_rate(total: int, fps: float, rate: float, max_duration: int) -> list[int]:
    """Return *rate* frames a second or, for a video longer than *max_duration*, as many as for one of that duration."""
    duration, last = total / fps, total - 1
    if duration <= max_duration:
        count = max(math.floor(duration * rate), 1)
        return [min(last, math.ceil(index * fps / rate)) for index in range(count)]
    count = int(max_duration * rate)
    if count >= total:
        return list(range(total))
    return [min(last, math.ceil(second * fps)) for second in np.linspace(0, duration, count).tolist()]


def _by_duration(total: int, fps: float) -> list[int]:
    """Return pairs of frames at a rate that falls as the duration grows.

    If there are too few frames, they are evenly spread, with repetitions.
    """
    duration = total / fps
    pairs = next((pairs for longest, pairs in RATES if duration <= longest), RATES[-1][1])
    count = min(max(1, int(min(duration, RATES[-1][0]) * pairs * 2)), MOST_FRAMES)
    if total < count:
        return _spread(0, total - 1, count)
    frames, second = [], 0.0
    for index in range(total):
        if index * (1 / fps) >= second:
            second += 1 / (2 * pairs)
            frames.append(index)
            if second >= int(duration):
                break
    if len(frames) < count:
        return _spread(frames[0], frames[-1], count)
    return frames if len(frames) == count else _spread(0, total - 1, count)


def _spread(first: int, last: int, count: int) -> list[int]:
    frames: list[int] = np.linspace(first, last, count, dtype=int).tolist()
    return frames

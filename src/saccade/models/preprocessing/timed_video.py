"""Computes the frames, size and prompt of videos whose prompt has the time before each group of frames.

Does not import torch.

Source of the rules: transformers 5.23, video_processing_qwen3_vl.py and processing_qwen3_vl.py.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from saccade.errors import InvalidValue
from saccade.models.family import VideoOptions
from saccade.models.preprocessing import smart_resize
from saccade.models.preprocessing.smart_video import CAP, FLOOR, SmartVideoLayout
from saccade.protocol.media import VideoHeader


class TimedVideoLayout(SmartVideoLayout):
    """Computes a video's layout from its header. Pixel limits apply to all frames together.

    A request may also limit each frame. Frames are then resized twice, first as in qwen-vl-utils, then as in the
    processor. *around* are the special tokens before and after the placeholders of each group.
    """

    around: ClassVar[tuple[str, str]]
    fixed: ClassVar[Mapping[str, Any]] = {"num_frames": None}
    limits_outside_size: ClassVar[bool] = False

    def settings_for(self, options: VideoOptions) -> Mapping[str, Any]:
        """Return `settings` changed by *options*. Raises InvalidValue."""
        of_all = replace(
            options,
            min_pixels=None if "min_pixels" in options.of_frame else options.min_pixels,
            max_pixels=None if "max_pixels" in options.of_frame else options.max_pixels,
        )
        of_frame = {f"frame_{name}": getattr(options, name) for name in sorted(options.of_frame)}
        least = (self.settings["patch_size"] * self.settings["merge_size"]) ** 2
        if (most := of_frame.get("frame_max_pixels", least)) < least:
            raise InvalidValue(
                f"`max_pixels` ({most}) is less than one token of this model has; send at least {least}.",
                "mm_processor_kwargs.max_pixels",
            )
        return {**super().settings_for(of_all), **of_frame}

    def within_total(self, total_pixels: int, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the settings that differ. The pixel limit already applies to all frames together.

        A total counts a group of frames once, as qwen-vl-utils does.
        """
        most = total_pixels * settings["temporal_patch_size"]
        return {"max_pixels": max(settings["min_pixels"], min(most, settings["max_pixels"]))}

    def sampled(self, header: VideoHeader, settings: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the indices of the frames to show to the model: evenly spread, including the first and the last."""
        total = header.num_frames
        if (num_frames := settings.get("num_frames")) is not None:
            count = min(num_frames, total)
        else:
            by_rate = int(total / header.fps * settings["fps"])
            count = min(max(by_rate, settings["min_frames"]), settings["max_frames"], total)
        # The reference's arithmetic, because its rounding decides between two frames.
        return tuple(np.linspace(0, total - 1, count).round().astype(int).tolist())

    def resized(self, header: VideoHeader, num_frames: int, settings: Mapping[str, Any]) -> tuple[int, int]:
        """Return (height, width) of the resized frames. Python's round half to even is part of the rule."""
        factor, group = settings["patch_size"] * settings["merge_size"], settings["temporal_patch_size"]
        count = max(num_frames, group)
        height, width = _within_frame(header, settings)
        if (side := min(height, width)) < factor:
            scale = factor / side
            height, width = int(height * scale), int(width * scale)
        least, most = settings["min_pixels"], _most(settings, count, factor)
        rows, columns = round(height / factor), round(width / factor)
        pixels = round(count / group) * group * rows * columns * factor * factor
        if pixels > most:
            shrink = math.sqrt(count * height * width / most)
            rows = max(1, math.floor(height / shrink / factor))
            columns = max(1, math.floor(width / shrink / factor))
        elif pixels < least:
            grow = math.sqrt(least / (count * height * width))
            rows, columns = math.ceil(height * grow / factor), math.ceil(width * grow / factor)
        return rows * factor, columns * factor

    def prompt(
        self, frames: tuple[int, ...], header: VideoHeader, settings: Mapping[str, Any], group_tokens: int
    ) -> tuple[str | int, ...]:
        """Return each group's time, the mean of its first and last frames' times, and its placeholders."""
        group, (before, after) = settings["temporal_patch_size"], self.around
        parts: list[str | int] = []
        for start in range(0, len(frames), group):
            first, last = frames[start], frames[min(start + group, len(frames)) - 1]
            seconds = (first / header.fps + last / header.fps) / 2
            parts += [f"<{seconds:.1f} seconds>", before, group_tokens, after]
        return tuple(parts)


def _within_frame(header: VideoHeader, settings: Mapping[str, Any]) -> tuple[int, int]:
    """Return (height, width) of a frame within the limits that a request sets for each frame."""
    least, most = settings.get("frame_min_pixels"), settings.get("frame_max_pixels")
    if least is None and most is None:
        return header.height, header.width
    limits = {"min_pixels": least or 1, "max_pixels": most or header.height * header.width + (least or 0)}
    return smart_resize.resized(header.width, header.height, {**settings, **limits})


def _most(settings: Mapping[str, Any], num_frames: int, factor: int) -> int:
    """Return how many pixels all frames may have together.

    A cap limits each frame to its tokens or its share, whichever is less.
    """
    most = int(settings["max_pixels"])
    if not settings[CAP]:
        return most
    share: int = min(settings["max_video_tokens"] * factor * factor, most // num_frames)
    return max(share, int(settings["min_pixels"] * FLOOR)) * num_frames

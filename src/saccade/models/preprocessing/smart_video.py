"""Computes the frames, size, grid and token count of videos for vision towers that merge 2 x 2 patches.

Does not import torch.

A patch spans several successive frames (`temporal_patch_size`); a grid's first number counts these groups. The wire
carries uint8, channel by channel, and within each channel frame by frame.

Source of the rules: transformers 5.23, video_processing_qwen2_vl.py, with `do_sample_frames` and
`cap_pixels_per_frame` set as in the release's library, qwen-vl-utils.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from msgspec.structs import replace

from saccade.errors import StartupError, VideoTooLarge
from saccade.models.family import VideoOptions
from saccade.models.preprocessing import smart_resize
from saccade.models.preprocessing.frames import check_as_images, check_rate, settings_for_videos
from saccade.models.preprocessing.processor_config import CHANNELS, check_fixed, whole_number
from saccade.protocol.media import ImageLayout, VideoHeader
from saccade.protocol.model_files import PREPROCESSOR_CONFIG

OF_PATCHES = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
"""Settings that images and videos share, because one network reads the patches of both."""

CAP = "cap_pixels_per_frame"
WHOLE = ("min_frames", "max_frames", "max_video_tokens")
BUDGET = 0.9
"""The share of max_video_tokens that a video may take."""

FLOOR = 1.05
"""A frame may always have this many times min_pixels."""

FIXED: Mapping[str, Any] = {CAP: True, "num_frames": None}
"""Settings with one supported value."""


class SmartVideoLayout:
    """Computes a video's layout from its header. A family adds its data, and its rules if they differ.

    *defaults* apply to keys that the video processor's settings lack. Patch settings default to the image processor's;
    pixel limits do not. *limits_outside_size* is as in SmartResizeLayout.
    """

    template_tokens: ClassVar[tuple[str, ...]]
    defaults: ClassVar[Mapping[str, Any]]
    fixed: ClassVar[Mapping[str, Any]] = FIXED
    limits_outside_size: ClassVar[bool] = True

    def __init__(
        self, config: Mapping[str, Any], preprocessor: Mapping[str, Any], video_preprocessor: Mapping[str, Any]
    ) -> None:
        of_images = {key: preprocessor[key] for key in OF_PATCHES if preprocessor.get(key) is not None}
        options = {**of_images, **{key: value for key, value in video_preprocessor.items() if value is not None}}
        with settings_for_videos():
            self.settings: Mapping[str, Any] = smart_resize.resolve(
                options, self.defaults, limits_outside_size=self.limits_outside_size
            )
            smart_resize.check_patches(config, self.settings, self.defaults)
            check_fixed(options, self.fixed)
            check_as_images(self.settings, of_images)
            check_rate(self.settings["fps"], "fps")
            for key in self.settings.keys() & set(WHOLE):
                whole_number(self.settings[key], key)
            if type(self.settings.get(CAP, True)) is not bool:
                raise StartupError(f"{PREPROCESSOR_CONFIG}: {CAP} must be true or false, not {self.settings[CAP]!r}.")

    def settings_for(self, options: VideoOptions) -> Mapping[str, Any]:
        """Return `settings` changed by *options*. Raises InvalidValue."""
        settings = {
            **self.settings,
            **{key: limit for key in ("min_pixels", "max_pixels") if (limit := getattr(options, key)) is not None},
            **smart_resize.sides(options),
        }
        smart_resize.check_order(settings["min_pixels"], settings["max_pixels"], options)
        if options.total_pixels is not None:
            settings |= self.within_total(options.total_pixels, settings)
        if options.max_frames is not None:
            settings["max_frames"] = min(options.max_frames, settings["max_frames"])
            settings["min_frames"] = min(settings["min_frames"], settings["max_frames"])
        if options.min_frames is not None:
            settings["min_frames"] = min(options.min_frames, settings["max_frames"])
        if options.num_frames is not None:
            settings["num_frames"] = min(options.num_frames, settings["max_frames"])
        elif options.fps is not None:
            settings["fps"] = options.fps
        return settings

    def within_total(self, total_pixels: int, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the settings that differ if all frames together have at most *total_pixels*."""
        return {"total_pixels": total_pixels}

    def video(self, header: VideoHeader, settings: Mapping[str, Any]) -> ImageLayout:
        """Return grid (groups of frames, rows, columns), tokens, patch shape and the frames. Raises VideoTooLarge."""
        patch, merge, group = settings["patch_size"], settings["merge_size"], settings["temporal_patch_size"]
        frames = header.indices or self.sampled(header, settings)
        if "resized_width" in settings:
            header = replace(header, width=settings["resized_width"], height=settings["resized_height"])
        long, short = max(header.width, header.height), min(header.width, header.height)
        if long > smart_resize.MAX_ASPECT * short:
            raise VideoTooLarge(
                f"The video's frames have {header.width} x {header.height} pixels; the long side may be at most "
                f"{smart_resize.MAX_ASPECT} times the short one."
            )
        resized_height, resized_width = self.resized(header, len(frames), settings)
        num_groups, rows, columns = -(-len(frames) // group), resized_height // patch, resized_width // patch
        num_patches = num_groups * rows * columns
        return ImageLayout(
            resized_height=resized_height,
            resized_width=resized_width,
            grid=(num_groups, rows, columns),
            num_tokens=num_patches // merge**2,
            pixel_shape=(num_patches, CHANNELS * group * patch * patch),
            prompt=self.prompt(frames, header, settings, rows * columns // merge**2),
            frames=frames,
            seconds_per_group=group / (len(frames) / header.num_frames * header.fps),
        )

    def sampled(self, header: VideoHeader, settings: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the indices of the frames to show to the model, evenly spread and in whole groups if there are enough.

        Source: transformers 5.23, video_processing_qwen2_vl.py, sample_frames, but in whole numbers: its float
        arithmetic occasionally samples one frame more. A video shorter than a group is taken whole.
        """
        total, group = header.num_frames, settings["temporal_patch_size"]
        if (num_frames := settings.get("num_frames")) is not None:
            count = min(round(num_frames / group), total // group) * group
        else:
            most = min(settings["max_frames"], total) // group * group
            by_rate = total / header.fps * settings["fps"]
            count = math.floor(min(max(by_rate, settings["min_frames"]), most) / group) * group
        if total <= group:
            return tuple(range(total))
        count = max(group, count)
        return tuple(index * total // count for index in range(count))

    def resized(self, header: VideoHeader, num_frames: int, settings: Mapping[str, Any]) -> tuple[int, int]:
        """Return (height, width) of the resized frames: like an image's, within the pixel budget."""
        factor = settings["patch_size"] * settings["merge_size"]
        budget = int(settings["max_video_tokens"] * factor * factor * BUDGET)
        budget = min(budget, settings.get("total_pixels", budget))
        share = min(settings["max_pixels"], budget * settings["temporal_patch_size"] // num_frames)
        most = max(share, int(settings["min_pixels"] * FLOOR))
        return smart_resize.resized(header.width, header.height, {**settings, "max_pixels": most})

    def prompt(
        self, frames: tuple[int, ...], header: VideoHeader, settings: Mapping[str, Any], group_tokens: int
    ) -> tuple[str | int, ...]:
        """Return the video's texts and placeholders in the prompt; by default (), which means only placeholders."""
        return ()

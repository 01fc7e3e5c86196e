"""Computes a video's frames, grid, tokens and prompt from its header. Runs in the gateway, without torch.

Source of the rules: transformers 5.23, video_processing_gemma4.py, processing_gemma4.py, and for the frames
video_utils.py, default_sample_indices_fn.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from saccade.errors import InvalidValue, StartupError
from saccade.models.family import VideoOptions
from saccade.models.gemma4 import layout
from saccade.models.preprocessing import frames
from saccade.models.preprocessing.unserved_options import OF_VIDEOS, refuse
from saccade.protocol.media import ImageLayout, VideoHeader
from saccade.protocol.model_files import VIDEO_PREPROCESSOR_CONFIG

DEFAULTS: Mapping[str, Any] = {**layout.DEFAULTS, "max_soft_tokens": 70, "num_frames": 32}
"""The defaults of transformers' Gemma4VideoProcessor."""


class VideoLayout:
    """The layout of a video: evenly spread frames, each an image with its time before it and its own token budget."""

    template_tokens: ClassVar[tuple[str, ...]] = ("<|video|>",)

    def __init__(
        self, config: Mapping[str, Any], preprocessor: Mapping[str, Any], video_preprocessor: Mapping[str, Any]
    ) -> None:
        with frames.settings_for_videos():
            self.settings = layout.resolve(config, video_preprocessor, DEFAULTS)
        if video_preprocessor.get("fps") is not None:
            raise StartupError(f"{VIDEO_PREPROCESSOR_CONFIG}: only a number of frames is supported, not `fps`.")

    def settings_for(self, options: VideoOptions) -> Mapping[str, Any]:
        """Return `settings` changed by *options*. Raises InvalidValue."""
        refuse(options, *OF_VIDEOS)
        if options.min_pixels is not None:
            raise InvalidValue(
                "min_pixels is not supported: this model enlarges every frame to its budget of tokens; leave it out.",
                "mm_processor_kwargs",
            )
        settings = layout.with_budget(self.settings, options.max_soft_tokens, options.max_pixels)
        return {**settings, **frames.sampling(options)}

    def video(self, header: VideoHeader, settings: Mapping[str, Any]) -> ImageLayout:
        """Return grid (frames, rows, columns), tokens, patch shape, the frames, and their text."""
        indices = header.indices or sampled(header, settings)
        frame = layout.image_layout(header.width, header.height, settings)
        parts: list[str | int] = []
        for index in indices:
            minutes, seconds = divmod(int(index / header.fps), 60)
            time = f"{minutes:02d}:{seconds:02d} "
            parts += [f" {time}" if parts else time, *frame.prompt]
        return frames.layout_of(frame, indices, parts)


def sampled(header: VideoHeader, settings: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the indices of the frames to show to the model: evenly spread, or all if the video has too few."""
    count = frames.num_sampled(header, settings)
    return tuple(index * header.num_frames // count for index in range(count))

"""Computes a video's frames, views, tokens and prompt from its header. Runs in the gateway, without torch.

Source of the rules: transformers 5.23, video_processing_internvl.py and processing_internvl.py.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from saccade.errors import StartupError
from saccade.models.family import VideoOptions
from saccade.models.internvl.layout import image_layout
from saccade.models.internvl.settings import resolve
from saccade.models.preprocessing import frames, processor_config
from saccade.models.preprocessing.unserved_options import LIMITS, OF_VIDEOS, refuse
from saccade.protocol.media import ImageLayout, VideoHeader

NUM_FRAMES = 8
"""The number of frames in the releases' examples; their files leave it open."""

ONE_VIEW: Mapping[str, Any] = {"min_tiles": 1, "max_tiles": 1}


class VideoLayout:
    """Takes the middle frame of each equal part of a video, and lays it out as one view after its number."""

    template_tokens: ClassVar[tuple[str, ...]] = ("<video>",)

    def __init__(
        self, config: Mapping[str, Any], preprocessor: Mapping[str, Any], video_preprocessor: Mapping[str, Any]
    ) -> None:
        of_images = resolve(config, preprocessor)
        stated = {key: value for key, value in video_preprocessor.items() if value is not None}
        with frames.settings_for_videos():
            settings = resolve(config, {**preprocessor, **stated})
            frames.check_as_images(settings, {key: of_images[key] for key in ("image_mean", "image_std")})
            processor_config.check_fixed(stated, {"initial_shift": True})
            num_frames = processor_config.whole_number(stated.get("num_frames", NUM_FRAMES), "num_frames")
            if "fps" in stated:
                raise StartupError("only a number of frames is supported, not `fps`.")
        self.settings: Mapping[str, Any] = {**settings, **ONE_VIEW, "num_frames": num_frames}

    def settings_for(self, options: VideoOptions) -> Mapping[str, Any]:
        """Return `settings` changed by *options*. Raises InvalidValue."""
        refuse(options, *LIMITS, *OF_VIDEOS)
        return {**self.settings, **frames.sampling(options)}

    def video(self, header: VideoHeader, settings: Mapping[str, Any]) -> ImageLayout:
        """Return grid (frames, rows, columns), tokens, views [F, 3, s, s], the frames, and their text."""
        indices = header.indices or sampled(header, settings)
        view = image_layout(header.width, header.height, settings)
        parts: list[str | int] = []
        for number in range(1, len(indices) + 1):
            name = f"Frame{number}: "
            parts += [f"\n{name}" if parts else name, *view.prompt]
        return frames.layout_of(view, indices, parts)


def sampled(header: VideoHeader, settings: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the indices of the frames to show to the model: the middles of equal parts, or all of a short video.

    This computes in whole numbers; the reference's float arithmetic moves some frames of very long videos by one.
    """
    count = frames.num_sampled(header, settings)
    return tuple((2 * index + 1) * header.num_frames // (2 * count) for index in range(count))

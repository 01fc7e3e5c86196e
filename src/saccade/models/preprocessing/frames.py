"""Videos whose frames are images of one size, in order. No torch."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from saccade.models.family import VideoOptions
from saccade.protocol.media import ImageLayout, VideoHeader


def sampling(options: VideoOptions) -> dict[str, Any]:
    """Return the settings that *options* change: a number of frames, or a rate instead of it."""
    if options.num_frames is not None:
        return {"num_frames": options.num_frames}
    return {} if options.fps is None else {"num_frames": None, "fps": options.fps}


def num_sampled(header: VideoHeader, settings: Mapping[str, Any]) -> int:
    """Return the number of frames that the model sees: all of a shorter video."""
    total, count = header.num_frames, settings["num_frames"]
    return min(max(1, int(total / header.fps * settings["fps"])) if count is None else count, total)


def layout_of(frame: ImageLayout, frames: tuple[int, ...], prompt: Sequence[str | int]) -> ImageLayout:
    """Return the layout of a video with the indices *frames*, from that of one *frame*; *prompt* has all its tokens."""
    return msgspec.structs.replace(
        frame,
        grid=(len(frames), *frame.grid[1:]),
        num_tokens=sum(part for part in prompt if isinstance(part, int)),
        pixel_shape=(len(frames) * frame.pixel_shape[0], *frame.pixel_shape[1:]),
        prompt=tuple(prompt),
        frames=frames,
    )

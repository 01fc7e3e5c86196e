"""Checks video settings, and lays out videos whose frames are equal-sized images in order. Does not import torch."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from saccade.errors import StartupError
from saccade.models.family import VideoOptions
from saccade.protocol.media import ImageLayout, VideoHeader
from saccade.protocol.model_files import PREPROCESSOR_CONFIG, VIDEO_PREPROCESSOR_CONFIG


@contextmanager
def settings_for_videos(file: str = VIDEO_PREPROCESSOR_CONFIG) -> Iterator[None]:
    """Name the video settings in *file*, instead of the image settings, in every StartupError that the block raises."""
    try:
        yield
    except StartupError as error:
        message = error.message.removeprefix(f"{PREPROCESSOR_CONFIG}: ")
        raise StartupError(f"{file}, the settings for videos: {message}") from error


def check_as_images(settings: Mapping[str, Any], of_images: Mapping[str, Any]) -> None:
    """Raise StartupError if a setting differs from *of_images*, since one network reads the patches of both."""
    for key, value in of_images.items():
        if settings[key] != value:
            raise StartupError(
                f"{key} is {settings[key]!r}, but {value!r} for images; the network reads the patches of both alike."
            )


def check_rate(fps: object, key: str) -> None:
    """Raise StartupError if *fps*, found under *key*, is not a number above 0."""
    if not isinstance(fps, int | float) or isinstance(fps, bool) or not 0 < fps < math.inf:
        raise StartupError(f"{key} must be a number above 0, not {fps!r}.")


def sampling(options: VideoOptions) -> dict[str, Any]:
    """Return the settings that *options* change: a number of frames, or else a rate."""
    if options.num_frames is not None:
        return {"num_frames": options.num_frames}
    return {} if options.fps is None else {"num_frames": None, "fps": options.fps}


def num_sampled(header: VideoHeader, settings: Mapping[str, Any]) -> int:
    """Return the number of frames that the model sees, at most as many as the video has."""
    total, count = header.num_frames, settings["num_frames"]
    return min(max(1, int(total / header.fps * settings["fps"])) if count is None else count, total)


def layout_of(frame: ImageLayout, frames: tuple[int, ...], prompt: Sequence[str | int]) -> ImageLayout:
    """Return a video's layout for the indices *frames*, from the layout of one *frame*; *prompt* has all tokens."""
    return msgspec.structs.replace(
        frame,
        grid=(len(frames), *frame.grid[1:]),
        num_tokens=sum(part for part in prompt if isinstance(part, int)),
        pixel_shape=(len(frames) * frame.pixel_shape[0], *frame.pixel_shape[1:]),
        prompt=tuple(prompt),
        frames=frames,
    )

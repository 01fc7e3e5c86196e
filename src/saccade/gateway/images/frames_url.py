"""Reads frames that a client has sampled from a video and sent in vLLM's format.

A URL begins with `data:video/jpeg;base64,`; the frames follow as encoded images, separated by commas.
`media_io_kwargs.video` sets their times. It has the whole video's `fps` (by default 1) and `total_num_frames`, and the
frames' indices in that video (by default 0, 1, 2 and so on).
"""

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from saccade.errors import (
    InvalidValue,
    InvalidVideo,
    RequestError,
    UnsupportedImageFormat,
    UnsupportedVideoFormat,
    VideoTooLarge,
)
from saccade.gateway.images.base64_text import decode_base64
from saccade.gateway.prompt.media_options import OF_VIDEOS
from saccade.media.header import SERVED_VIDEOS, ImageHeader, ImageLimits, other_format, read_header
from saccade.media.video_header import FRAMES_PREFIX, VideoLimits
from saccade.models.family import FrameTimes, ImageOptions, VideoOptions
from saccade.protocol.media import VideoHeader

MAX_FRAMES = 768

DEFAULT_FPS = 1.0


def is_frames_url(url: str) -> bool:
    """Return whether *url* contains frames instead of a video."""
    return url[: len(FRAMES_PREFIX)].lower() == FRAMES_PREFIX


def read_frames(url: str, options: VideoOptions, limits: ImageLimits) -> tuple[bytes, VideoHeader]:
    """Return the frames in *url* with their header, encoded for a decode process, and the header itself.

    Raises InvalidBase64, InvalidVideo, VideoTooLarge, InvalidValue and the errors of images.
    """
    payload = url[len(FRAMES_PREFIX) :]
    check_frame_count(payload.count(",") + 1, options)
    return join_frames([decode_base64(frame) for frame in payload.split(",")], options, limits)


def check_frame_count(num_frames: int, options: ImageOptions | VideoOptions) -> None:
    """Raise VideoTooLarge if there are more frames than *options* or this server allows."""
    stated = (options.num_frames, options.max_frames) if isinstance(options, VideoOptions) else ()
    most = min((MAX_FRAMES, *(number for number in stated if number is not None)))
    if num_frames > most:
        raise VideoTooLarge(f"The video has more than {most} frames; send fewer.")


def join_frames(
    frames: Sequence[bytes], options: VideoOptions, limits: ImageLimits, field: str = ""
) -> tuple[bytes, VideoHeader]:
    """Return *frames*, encoded images from the list *field*, in the form that read_frames() returns."""
    sizes = set()
    for position, frame in enumerate(frames):
        try:
            image = _read_frame_header(frame)
            limits.check_header(image, len(frame))
        except RequestError as error:
            raise error.at(f"{field}[{position}]") if field else error from error
        sizes.add(image.upright)
    if len(sizes) > 1:
        raise InvalidVideo("The video's frames have several sizes, which is not supported.")
    ((width, height),) = sizes
    VideoLimits().check_size(width, height)
    indices = _indices(options.times, len(frames))
    num_frames = options.times.num_frames or indices[-1] + 1
    header = VideoHeader(num_frames, options.times.fps or DEFAULT_FPS, width, height, indices)
    return msgspec.msgpack.encode((header, frames)), header


def _read_frame_header(frame: bytes) -> ImageHeader:
    try:
        return read_header(frame)
    except UnsupportedImageFormat:
        name = other_format(frame)
        if name not in SERVED_VIDEOS:
            raise
        media_type = SERVED_VIDEOS[name]
        raise UnsupportedVideoFormat(
            f"The bytes are {name}, not a frame: send it as {media_type}, in `data:{media_type};base64,`. "
            f"`{FRAMES_PREFIX}` takes images, with commas between them."
        ) from None


def _indices(times: FrameTimes, num_frames: int) -> tuple[int, ...]:
    indices, field = times.indices or tuple(range(num_frames)), f"{OF_VIDEOS}.frames_indices"
    if len(indices) != num_frames:
        raise InvalidValue(f"`{field}` has {len(indices)} numbers for {num_frames} frames; send one for each.", field)
    if any(first >= second for first, second in pairwise(indices)):
        raise InvalidValue(f"`{field}` must ascend.", field)
    if times.num_frames is not None and indices[-1] >= times.num_frames:
        field = f"{OF_VIDEOS}.total_num_frames"
        raise InvalidValue(f"`{field}` must be over {indices[-1]}, the last frame's index.", field)
    return indices

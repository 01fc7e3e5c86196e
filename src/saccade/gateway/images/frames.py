"""Frames that a client has sampled from a video: vLLM's `data:video/jpeg;base64,`, with commas between the images.

`media_io_kwargs.video` has their times: `fps` of the whole video, by default 1, `total_num_frames`, and the indices of
the frames in it, by default 0, 1, 2 and so on.
"""

from itertools import pairwise

import msgspec

from saccade.errors import InvalidValue, InvalidVideo, VideoTooLarge
from saccade.gateway.images.media_loader import decode_base64
from saccade.gateway.prompt.media_options import OF_VIDEOS
from saccade.media.header import ImageLimits, read_header
from saccade.media.video_header import VideoLimits
from saccade.models.family import FrameTimes, VideoOptions
from saccade.protocol.media import VideoHeader

MAX_FRAMES = 768
DEFAULT_FPS = 1.0
PREFIX = "data:video/jpeg;base64,"


def is_frames_url(url: str) -> bool:
    """Whether *url* has frames in place of a video."""
    return url[: len(PREFIX)].lower() == PREFIX


def read_frames(url: str, options: VideoOptions, limits: ImageLimits) -> tuple[bytes, VideoHeader]:
    """Return the frames in *url* and their header, in the form of the decode processes, and the header.

    Raises InvalidBase64, InvalidVideo, VideoTooLarge, InvalidValue and the errors of images.
    """
    payload = url[len(PREFIX) :]
    if payload.count(",") >= (most := min(MAX_FRAMES, options.num_frames or MAX_FRAMES)):
        raise VideoTooLarge(f"The video has more than {most} frames; send fewer.")
    frames = [decode_base64(frame) for frame in payload.split(",")]
    sizes = set()
    for frame in frames:
        image = read_header(frame)
        limits.check(image, len(frame))
        sizes.add(image.upright)
    if len(sizes) > 1:
        raise InvalidVideo("The video's frames have several sizes, which is not supported.")
    ((width, height),) = sizes
    VideoLimits().check_size(width, height)
    indices = _indices(options.times, len(frames))
    num_frames = options.times.num_frames or indices[-1] + 1
    header = VideoHeader(num_frames, options.times.fps or DEFAULT_FPS, width, height, indices)
    return msgspec.msgpack.encode((header, frames)), header


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

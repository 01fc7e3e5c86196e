"""Frames that a client has sampled are read by their headers, and refused by name."""

import base64
from typing import Any

import images
import msgspec
import pytest
from tables import table

from saccade.errors import InvalidBase64, InvalidImage, InvalidValue, InvalidVideo, RequestError, VideoTooLarge
from saccade.gateway.images.frames_url import is_frames_url, read_frames
from saccade.media.header import ImageLimits
from saccade.models.family import FrameTimes, VideoOptions
from saccade.protocol.media import VideoHeader

FRAMES = [images.encode(images.random_image(20, 10, seed=seed), "JPEG") for seed in range(3)]
UPRIGHT = images.encode(images.random_image(10, 20))


def url(*frames: bytes) -> str:
    return "data:video/jpeg;base64," + ",".join(base64.b64encode(frame).decode() for frame in frames)


@table(
    ("times", "header"),
    [
        (FrameTimes(), VideoHeader(3, 1.0, 20, 10, (0, 1, 2))),
        (FrameTimes(fps=2.5), VideoHeader(3, 2.5, 20, 10, (0, 1, 2))),
        (FrameTimes((0, 5, 9)), VideoHeader(10, 1.0, 20, 10, (0, 5, 9))),
        (FrameTimes((0, 5, 9), 99, 30), VideoHeader(99, 30, 20, 10, (0, 5, 9))),
    ],
)
def test_times_become_the_header(times: FrameTimes, header: VideoHeader) -> None:
    content, read = read_frames(url(*FRAMES), VideoOptions(times=times), ImageLimits())
    assert read == header
    assert msgspec.msgpack.decode(content, type=tuple[VideoHeader, list[bytes]]) == (header, FRAMES)


@table(
    ("frames", "options", "kind"),
    [
        (url(), {}, InvalidImage),
        (url(FRAMES[0]) + ",?", {}, InvalidBase64),
        (url(FRAMES[0], UPRIGHT), {}, InvalidVideo),
        (url(FRAMES[0], b"no image"), {}, RequestError),
        (url(*[b"x"] * 769), {}, VideoTooLarge),
        (url(*FRAMES), {"num_frames": 2}, VideoTooLarge),
        (url(*FRAMES), {"times": FrameTimes((0, 1))}, InvalidValue),
        (url(*FRAMES), {"times": FrameTimes((0, 2, 2))}, InvalidValue),
        (url(*FRAMES), {"times": FrameTimes((0, 1, 2), 2)}, InvalidValue),
        (url(images.png(9000, 2)), {}, VideoTooLarge),
    ],
)
def test_other_frames_are_refused(frames: str, options: dict[str, Any], kind: type[RequestError]) -> None:
    with pytest.raises(kind):
        read_frames(frames, VideoOptions(**options), ImageLimits())


def test_the_media_type_tells_frames_from_videos() -> None:
    assert is_frames_url("DATA:video/JPEG;base64,")
    assert not is_frames_url("data:video/mp4;base64,")

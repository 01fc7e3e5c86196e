"""Reading videos, against FFmpeg called plainly."""

import contextlib
import io

import av
import clips
import numpy as np
import pytest
from tables import table

from saccade.errors import InvalidVideo, RequestError, UnsupportedVideoFormat, VideoTooLarge
from saccade.media.video import read_frames, read_header
from saccade.media.video_header import VideoLimits
from saccade.protocol.media import VideoHeader

SERVED = clips.served()
BROKEN = clips.broken()
LIMITS = VideoLimits()


def plain_frames(encoded: bytes) -> list[np.ndarray]:
    """Return all frames as FFmpeg gives them, with its own choice of container and threads."""
    found = []
    with av.open(io.BytesIO(encoded)) as container:
        for packet in container.demux(video=0):
            found += [] if packet.is_corrupt else packet.decode()
    return [np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90) for frame in found]


def frames(encoded: bytes, indices: list[int], limits: VideoLimits = LIMITS) -> list[np.ndarray]:
    return list(read_frames(encoded, read_header(encoded, limits), indices, limits))


@table("name", SERVED)
def test_frames_and_their_number_equal_ffmpeg(name: str) -> None:
    expected = plain_frames(SERVED[name])
    header = read_header(SERVED[name], LIMITS)
    assert (header.num_frames, header.height, header.width) == (len(expected), *expected[0].shape[:2])
    indices = sorted({0, len(expected) // 3, len(expected) // 2, len(expected) - 1})
    for index, frame in zip(indices, frames(SERVED[name], indices), strict=True):
        np.testing.assert_array_equal(frame, expected[index])


def test_rate_is_the_average() -> None:
    assert read_header(clips.clip(num_frames=12, fps=4), LIMITS).fps == 4
    assert 4 < read_header(SERVED["h264 of an uneven rate"], LIMITS).fps < 6


def test_cut_video_has_the_frames_before_the_cut() -> None:
    assert 2 < read_header(SERVED["h264, cut"], LIMITS).num_frames < 23


def test_rotation_swaps_the_sides() -> None:
    header = read_header(clips.rotated(), LIMITS)
    assert (header.width, header.height) == (32, 64)
    (frame,), (unrotated,) = frames(clips.rotated(), [0]), frames(clips.clip(width=64, height=32), [0])
    np.testing.assert_array_equal(frame, np.rot90(unrotated, -1))


@table("name", BROKEN)
def test_broken_video_is_the_requests_error(name: str) -> None:
    with pytest.raises((InvalidVideo, UnsupportedVideoFormat)):
        frames(BROKEN[name], [0, 11])


@table("step", range(40))
def test_video_cut_anywhere_is_served_or_refused(step: int) -> None:
    whole = clips.clip("vp9")
    with contextlib.suppress(RequestError):
        (frame,) = frames(whole[: len(whole) * step // 40], [0])
        assert frame.shape == (48, 64, 3)


@table("seed", range(40))
def test_damaged_video_is_served_or_refused(seed: int) -> None:
    content = bytearray(clips.clip())
    generator = np.random.default_rng(seed)
    for place in generator.integers(12, len(content), 1 + seed):
        content[place] = generator.integers(256)
    with contextlib.suppress(RequestError):
        assert len(frames(bytes(content), [0, 5, 11])) == 3


@pytest.mark.parametrize(
    "limits",
    [
        VideoLimits(max_pixels=64 * 48 - 1),
        VideoLimits(max_side=63),
        VideoLimits(max_frames=11),
        VideoLimits(max_encoded_bytes=100),
    ],
    ids=["pixels", "side", "frames", "bytes"],
)
def test_video_over_a_limit_is_refused(limits: VideoLimits) -> None:
    with pytest.raises(VideoTooLarge):
        read_header(clips.clip(), limits)


def test_other_codecs_are_refused() -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as out:
        stream = out.add_stream("ffv1", rate=4)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        out.mux(stream.encode(av.VideoFrame(64, 48, "yuv420p")))
        out.mux(stream.encode())
    with pytest.raises(UnsupportedVideoFormat):
        read_header(file.getvalue(), LIMITS)


def test_frames_of_another_size_than_the_headers_are_refused() -> None:
    with pytest.raises(InvalidVideo):
        list(read_frames(clips.clip(), VideoHeader(12, 4.0, 32, 48), [0], LIMITS))


def test_fewer_frames_than_wanted_is_an_error() -> None:
    with pytest.raises(InvalidVideo):
        frames(clips.clip(), [0, 12])

"""Reading videos, against FFmpeg called plainly."""

import contextlib
import io
import struct
from fractions import Fraction

import av
import clips
import matroska
import numpy as np
import pytest
from tables import table

from saccade.errors import InvalidVideo, RequestError, UnsupportedVideoFormat, VideoTooLarge
from saccade.media.video import UNKNOWN_FPS, read_frames, read_header
from saccade.media.video_header import VideoLimits
from saccade.protocol.media import VideoHeader

SERVED = {
    **clips.served(),
    "vp8 with frames that are not shown": clips.hidden(clips.clip("vp8"), (3, 7, 11)),
    "h264 in a MOV without its kind": clips.clip().replace(b"ftyp", b"wide", 1),
}
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


STEADY = tuple(range(0, 3000, 100))
UNEVEN = (0, 40, 90, 300, 310, 700, 1500, 1510, 1900, 2400)
PAUSED = (*range(0, 1000, 100), *range(20_900, 21_900, 100))
NTSC = tuple(round(index * 1001 / 30) for index in range(90))
SLIDES = (0, 120_000, 240_000, 600_000)
PAUSED_MP4 = clips.clip(num_frames=20, times=PAUSED)


def ten_a_second(codec: str, **stated: float) -> bytes:
    return matroska.recorded(codec, STEADY, **stated)


def with_duration_in_header(encoded: bytes, ticks: int) -> bytes:
    """Return an MP4 whose media header (mdhd) states another duration."""
    changed = bytearray(encoded)
    start = encoded.index(b"mdhd") + 20
    changed[start : start + 4] = struct.pack(">I", ticks)
    return bytes(changed)


def container_rate(encoded: bytes) -> float:
    """Return the average rate that FFmpeg takes from the container."""
    with av.open(io.BytesIO(encoded)) as container:
        return float(container.streams.video[0].average_rate)


@table(
    ("encoded", "rate"),
    [
        *((ten_a_second(codec), 10) for codec in matroska.NAMES),
        *((ten_a_second(codec, nominal=30), 10) for codec in matroska.NAMES),
        (ten_a_second("vp8", nominal=30, duration=3000), 10),
        (ten_a_second("vp8", duration=9000), 10),
        (ten_a_second("vp9", nominal=10), 10),
        (ten_a_second("vp9", nominal=1000), 10),
        (ten_a_second("vp9", nominal=0.1), 10),
        (matroska.recorded("vp8", tuple(5000 + time for time in STEADY)), 10),
        (matroska.recorded("h264", tuple(5000 + time for time in STEADY), 30), 10),
        (matroska.recorded("vp8", NTSC, 30_000 / 1001), 30_000 / 1001),
        (matroska.recorded("h264", NTSC, 30_000 / 1001), 30_000 / 1001),
        (matroska.recorded("vp8", NTSC), Fraction(89 * 1000, NTSC[-1])),
        *((matroska.recorded(codec, UNEVEN, nominal), 9 / 2.4) for codec in ("vp8", "h264") for nominal in (None, 30)),
        (matroska.recorded("vp9", PAUSED), Fraction(19 * 1000, 21_800)),
        (matroska.recorded("vp9", PAUSED, 10), Fraction(19 * 1000, 21_800)),
        (matroska.recorded("vp8", SLIDES), 3 / 600),
        (matroska.recorded("vp8", (0, 1500)), 1 / 1.5),
        (matroska.recorded("vp8", (0, 1500), 30), 1 / 1.5),
        (matroska.recorded("vp8", (7000,)), UNKNOWN_FPS),
        (matroska.recorded("vp8", (7000,), 30), 30),
        (matroska.recorded("vp8", (40, 40, 40), 30), 30),
        (matroska.recorded("vp8", (40, 40, 40)), UNKNOWN_FPS),
        (clips.fragmented(clips.clip(num_frames=10, times=UNEVEN)), 9 / 2.4),
        (clips.fragmented(clips.clip(num_frames=30, fps=10)), 10),
    ],
)
def test_rate_is_that_of_the_times_of_the_frames(encoded: bytes, rate: float) -> None:
    header = read_header(encoded, LIMITS)
    assert header.fps == pytest.approx(float(rate), rel=1e-3)
    assert len(frames(encoded, [*range(header.num_frames)])) == header.num_frames


def test_rate_that_agrees_with_the_times_is_exact() -> None:
    assert read_header(matroska.recorded("vp9", NTSC, 30_000 / 1001), LIMITS).fps == 30_000 / 1001


def test_times_of_decoding_give_the_rate_if_there_are_no_others() -> None:
    header = read_header(matroska.recorded("h264", STEADY, decoding_times=True), LIMITS)
    assert (header.num_frames, header.fps) == (30, pytest.approx(10, rel=0.06))


@table(
    "encoded",
    [
        *(clip for name, clip in SERVED.items() if name.startswith(("h264", "hevc", "av1", "gif"))),
        PAUSED_MP4,
        with_duration_in_header(PAUSED_MP4, 100),
        with_duration_in_header(clips.clip(num_frames=31, fps=30), 1),
        clips.clip("gif", num_frames=20, times=PAUSED),
        clips.clip("gif", num_frames=10, times=UNEVEN),
        clips.clip("gif", num_frames=2),
    ],
)
def test_rate_of_a_container_that_counts_its_frames_stays(encoded: bytes) -> None:
    assert read_header(encoded, LIMITS).fps == container_rate(encoded)


def test_pause_lowers_the_rate_in_each_container() -> None:
    """A pause of 20 s counts as time in which nothing is shown anew: the frames are spread over all 22 s."""
    for encoded in (PAUSED_MP4, matroska.recorded("vp9", PAUSED), clips.clip("gif", num_frames=20, times=PAUSED)):
        assert read_header(encoded, LIMITS).fps == pytest.approx(20 / 22, rel=0.1)


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

"""Encoded videos of every kind that is served, and broken ones; all drawn and encoded here, from seeds."""

import io
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import cache

import av
import numpy as np
from images import draw

CODECS = {
    "h264": ("libx264", "mp4", "yuv420p"),
    "hevc": ("libx265", "mp4", "yuv420p"),
    "vp8": ("libvpx", "webm", "yuv420p"),
    "vp9": ("libvpx-vp9", "webm", "yuv420p"),
    "av1": ("libsvtav1", "mp4", "yuv420p"),
    "gif": ("gif", "gif", "rgb8"),
}
"""FFmpeg's encoder, container and pixel format."""

QUIET = {"libx265": {"x265-params": "log-level=none"}, "libsvtav1": {"svtav1-params": "lp=1"}}
TICKS = 1000
"""A second, in the unit of *times*."""

ROTATED = struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30)
"""A display matrix, as it stands in an MP4: turn the frames by a quarter, clockwise."""


@contextmanager
def _own_priority() -> Iterator[None]:
    """Undo what SVT-AV1 does for root: it makes its caller a real-time thread, beside which nothing else runs in time."""
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, parameters)


@cache
def clip(
    codec: str = "h264",
    width: int = 64,
    height: int = 48,
    num_frames: int = 12,
    fps: int = 4,
    times: Sequence[int] = (),
) -> bytes:
    """Return a video in which a drawing moves; *times* are those of the frames, where they have no constant rate."""
    encoder, container, pixels = CODECS[codec]
    file = io.BytesIO()
    with _own_priority(), av.open(file, "w", format=container) as out:
        stream = out.add_stream(encoder, rate=fps, options=QUIET.get(encoder, {}))
        stream.width, stream.height, stream.pix_fmt = width, height, pixels
        if times:
            stream.codec_context.time_base = Fraction(1, TICKS)
        for index in range(num_frames):
            frame = av.VideoFrame.from_ndarray(np.roll(draw(width, height), 5 * index, 1), format="rgb24")
            if times:
                frame.pts, frame.time_base = times[index], Fraction(1, TICKS)
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return file.getvalue()


def rotated() -> bytes:
    """Return a clip whose container says that its frames lie on their side."""
    content = bytearray(clip(width=64, height=32))
    start = content.index(b"tkhd") + 4 + 40
    content[start : start + 36] = ROTATED
    return bytes(content)


def hidden(encoded: bytes, indices: Sequence[int]) -> bytes:
    """Return *encoded*, a clip of VP8, with frames of *indices* that are decoded and not shown."""
    file = io.BytesIO()
    with av.open(io.BytesIO(encoded)) as given, av.open(file, "w", format="webm") as out:
        stream = out.add_stream_from_template(given.streams.video[0])
        packets = (packet for packet in given.demux(given.streams.video[0]) if packet.size)
        for index, packet in enumerate(packets):
            content = bytearray(bytes(packet))
            content[0] &= ~0x10 if index in indices else 0xFF
            other = av.Packet(bytes(content))
            other.pts, other.dts, other.time_base = packet.pts, packet.dts, packet.time_base
            other.is_keyframe, other.stream = packet.is_keyframe, stream
            out.mux(other)
    return file.getvalue()


@cache
def sound() -> bytes:
    """Return an MP4 without any video."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        stream = out.add_stream("aac", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 4096), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return file.getvalue()


def fragmented(encoded: bytes) -> bytes:
    """Return *encoded* as an MP4 with a fragment for each frame; it keeps its frames when it is cut."""
    file = io.BytesIO()
    with (
        av.open(io.BytesIO(encoded)) as given,
        av.open(file, "w", format="mp4", options={"movflags": "frag_every_frame"}) as out,
    ):
        stream = out.add_stream_from_template(given.streams.video[0])
        for packet in given.demux(given.streams.video[0]):
            if packet.dts is not None:
                packet.stream = stream
                out.mux(packet)
    return file.getvalue()


def served() -> dict[str, bytes]:
    """Return twelve videos that are served, by what is special about them."""
    uneven = (0, 40, 90, 300, 310, 700, 1500, 1510, 1900, 2400)
    cut = fragmented(clip(num_frames=24))
    return {
        "h264": clip(),
        "h264 of odd sides at 30 fps": clip("h264", 66, 50, 31, 30),
        "h264 of an uneven rate": clip("h264", 64, 48, 10, times=uneven),
        "h264 of one frame": clip("h264", num_frames=1),
        "h264 on its side": rotated(),
        "h264, cut": cut[: len(cut) * 2 // 3],
        "hevc": clip("hevc", 72, 64, 5),
        "vp8": clip("vp8", 65, 49),
        "vp9 of odd sides": clip("vp9", 81, 47, 9, 3),
        "av1": clip("av1", 128, 96, 7),
        "gif": clip("gif", 65, 49, 7),
        "gif of one frame": clip("gif", 40, 90, 1),
    }


def broken() -> dict[str, bytes]:
    """Return files that are no videos or cannot be decoded, by what is wrong."""
    whole = clip()
    fuzzed = bytearray(whole)
    data = whole.index(b"mdat") + 4
    fuzzed[data : data + 2000] = bytes(2000)
    return {
        "nothing": b"",
        "text": b"#EXTM3U\nhttp://127.0.0.1:1/a.ts\n",
        "a list of files": b"ffconcat version 1.0\nfile /etc/passwd\n",
        "a container without content": whole[:32],
        "truncated": whole[: len(whole) // 2],
        "without pixels": bytes(fuzzed),
        "sound": sound(),
        "gif without frames": b"GIF89a\x10\x00\x10\x00\x00\x00\x00\x3b",
        "webm cut in its header": clip("vp9")[:100],
    }

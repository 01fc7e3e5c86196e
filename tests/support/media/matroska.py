"""Matroska as browsers and screen recorders write it: live, with times in blocks and whatever the track states of them.

Written by hand since FFmpeg's muxer always states a rate. Elements are those of RFC 9559.
"""

import io
import struct
from collections.abc import Sequence
from functools import cache

import av
import clips

NAMES = {"h264": "V_MPEG4/ISO/AVC", "hevc": "V_MPEGH/ISO/HEVC", "vp8": "V_VP8", "vp9": "V_VP9", "av1": "V_AV1"}
UNKNOWN = b"\x01" + b"\xff" * 7
"""The length of a live element: it ends where the next one of its level begins."""

WINDOWS = "V_MS/VFW/FOURCC"
"""The codec's name if its private data is that of Windows: then blocks have the times of decoding."""

FOURCC = {"h264": b"H264", "hevc": b"HEVC"}


@cache
def recorded(
    codec: str = "vp8",
    times: Sequence[int] = tuple(range(0, 3000, 100)),
    nominal: float | None = None,
    duration: int | None = None,
    *,
    decoding_times: bool = False,
) -> bytes:
    """Return a live video whose frames have *times* in ms, in the order that they are shown.

    *nominal* is the rate that the track states, *duration* the file's in ms; by default neither is stated. With
    *decoding_times* blocks have those, and no times to show the frames at.
    """
    with av.open(io.BytesIO(clips.clip(codec, num_frames=len(times)))) as source:
        stream = source.streams.video[0]
        packets = [packet for packet in source.demux(stream) if packet.size]
        private = stream.codec_context.extradata or b""
    shown = sorted(packet.pts for packet in packets)
    name = NAMES[codec]
    if decoding_times:
        name, private = WINDOWS, struct.pack("<IiiHH4s20x", 40, 64, 48, 1, 24, FOURCC[codec]) + private
    track = [integer(0xD7, 1), integer(0x73C5, 1), integer(0x83, 1), element(0x86, name.encode())]
    track += [element(0x63A2, private)] if codec in ("h264", "hevc", "av1") else []
    track += [integer(0x23E383, round(1e9 / nominal))] if nominal else []
    track += [element(0xE0, integer(0xB0, 64) + integer(0xBA, 48))]
    info = integer(0x2AD7B1, 1_000_000) + (element(0x4489, struct.pack(">d", duration)) if duration else b"")
    body = element(0x1549A966, info) + element(0x1654AE6B, element(0xAE, b"".join(track)))
    for position, packet in enumerate(packets):
        time = times[position if decoding_times else shown.index(packet.pts)]
        block = b"\x81\0\0" + (b"\x80" if packet.is_keyframe else b"\0") + bytes(packet)
        body += b"\x1f\x43\xb6\x75" + UNKNOWN + integer(0xE7, time) + element(0xA3, block)
    head = element(0x4282, b"matroska") + integer(0x4287, 4) + integer(0x4285, 2)
    return element(0x1A45DFA3, head) + b"\x18\x53\x80\x67" + UNKNOWN + body


def element(name: int, content: bytes) -> bytes:
    return _plain(name) + struct.pack(">Q", 1 << 56 | len(content)) + content


def integer(name: int, value: int) -> bytes:
    return element(name, _plain(value) or b"\0")


def _plain(value: int) -> bytes:
    return value.to_bytes((value.bit_length() + 7) // 8, "big")

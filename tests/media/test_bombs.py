"""Files that cost a decoder much and their sender little: each is served, or refused in a sentence of ours.

The images are those of attacks.CORPUS, which test_fuzz.py reads; here are videos, and metadata that grow when they are
read.
"""

import struct
import tracemalloc
import zlib
from collections.abc import Callable
from functools import partial

import attacks
import clips
import images
import matroska
from tables import table

from saccade.errors import InvalidVideo, RequestError, UnsupportedVideoFormat, VideoTooLarge
from saccade.media.header import read_header as read_image_header
from saccade.media.video import read_frames, read_header
from saccade.media.video_header import VideoLimits

MIB = 1 << 20
MANY = 0xFFFF_FFFF


def patched(kind: bytes, offset: int, value: int, size: int = 4) -> bytes:
    """Return an MP4 whose box *kind* has *value* in the *size* bytes at *offset* of its content."""
    whole = bytearray(clips.clip())
    start = whole.index(kind) + 4 + offset
    whole[start : start + size] = value.to_bytes(size, "big")
    return bytes(whole)


def box(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I4s", 8 + len(content), kind) + content


def nested(kind: bytes, depth: int) -> bytes:
    """Return *depth* boxes of *kind*, one in the other."""
    return b"".join(struct.pack(">I4s", 8 * (depth - level), kind) for level in range(depth))


def within_moov(content: bytes) -> bytes:
    """Return an MP4 with *content* at the end of its moov, which is the file's last box."""
    whole = clips.clip()
    start = whole.index(b"moov") - 4
    (length,) = struct.unpack_from(">I", whole, start)
    assert start + length == len(whole)
    return whole[:start] + struct.pack(">I", length + len(content)) + whole[start + 4 :] + content


def edits(number: int) -> bytes:
    """Return an MP4 whose list of edits shows the whole video *number* times."""
    entry = struct.pack(">IiHH", 3000, 0, 1, 0)
    whole = clips.clip()
    start, trak = whole.index(b"edts") - 4, whole.index(b"trak") - 4
    (length,) = struct.unpack_from(">I", whole, start)
    new = box(b"edts", box(b"elst", struct.pack(">II", 0, number) + entry * number))
    grown = bytearray(whole[:start] + new + whole[start + length :])
    for at in (trak, whole.index(b"moov") - 4):
        (old,) = struct.unpack_from(">I", grown, at)
        struct.pack_into(">I", grown, at, old + len(new) - length)
    return bytes(grown)


def deflated(num_bytes: int) -> bytes:
    """Return a Matroska video whose first block inflates to *num_bytes*, by its track's own compression."""
    element = matroska.element
    track = [matroska.integer(0xD7, 1), matroska.integer(0x73C5, 1), matroska.integer(0x83, 1)]
    track += [element(0x86, b"V_VP8"), element(0xE0, matroska.integer(0xB0, 64) + matroska.integer(0xBA, 48))]
    compression = element(0x5034, matroska.integer(0x4254, 0))
    track.append(element(0x6D80, element(0x6240, matroska.integer(0x5031, 0) + compression)))
    block = element(0xA3, b"\x81\0\0\x80" + zlib.compress(bytes(num_bytes), 9))
    cluster = element(0x1F43B675, matroska.integer(0xE7, 0) + block)
    body = element(0x1549A966, matroska.integer(0x2AD7B1, 1_000_000))
    body += element(0x1654AE6B, element(0xAE, b"".join(track))) + cluster
    head = element(0x1A45DFA3, element(0x4282, b"matroska") + matroska.integer(0x4287, 4) + matroska.integer(0x4285, 2))
    return head + element(0x18538067, body)


def behind(content: bytes) -> bytes:
    """Return a live Matroska video with *content* after its last block."""
    return matroska.recorded() + content


def tags(depth: int) -> bytes:
    """Return Matroska's tags, one in the other."""
    content = b""
    for _ in range(depth):
        content = matroska.element(0x67C8, content)
    return matroska.element(0x1254C367, matroska.element(0x7373, content))


SERVED = True
VIDEOS: dict[str, tuple[Callable[[], bytes], bool | None]] = {
    "mp4 of 4 billion sizes": (lambda: patched(b"stsz", 8, MANY), None),
    "mp4 of 4 billion frames of one size": (lambda: patched(b"stsz", 4, MANY << 32 | MANY, 8), None),
    "mp4 of 4 billion times": (lambda: patched(b"stts", 4, MANY), None),
    "mp4 of 4 billion equal times": (lambda: patched(b"stts", 8, MANY), None),
    "mp4 of 4 billion chunks": (lambda: patched(b"stco", 4, MANY), None),
    "mp4 of 4 billion runs": (lambda: patched(b"stsc", 4, MANY), None),
    "mp4 of 4 billion frames in a chunk": (lambda: patched(b"stsc", 12, MANY), None),
    "mp4 of 4 billion edits": (lambda: patched(b"elst", 4, MANY), None),
    "mp4 that is shown 100,000 times": (lambda: edits(100_000), None),
    "mp4 of no time scale": (lambda: patched(b"mdhd", 12, 0), None),
    "mp4 of the largest time scale": (lambda: patched(b"mdhd", 12, MANY), None),
    "mp4 of 65,535 x 65,535": (lambda: patched(b"avc1", 24, MANY), None),
    "mp4 of 30 MiB of metadata": (lambda: within_moov(box(b"udta", box(b"meta", bytes(30 * MIB)))), None),
    "mp4 of 30 MiB of nothing": (lambda: within_moov(box(b"free", bytes(30 * MIB))), SERVED),
    "mp4 of 100,000 boxes": (lambda: within_moov(box(b"free", b"") * 100_000), None),
    "mp4 of 100,000 tracks": (lambda: within_moov(box(b"trak", b"") * 100_000), None),
    "mp4 of nested boxes": (lambda: within_moov(nested(b"moov", 100_000)), None),
    "mp4 of nested tracks": (lambda: within_moov(nested(b"trak", 100_000)), None),
    "mp4 of another mp4": (lambda: within_moov(clips.clip()), None),
    "matroska block of 100 MiB": (lambda: deflated(100 * MIB), False),
    "matroska of nested tags": (lambda: behind(tags(200)), None),
    "matroska of 100,000 empty clusters": (lambda: behind(matroska.element(0x1F43B675, b"") * 100_000), None),
    "matroska of 30 MiB attached": (
        lambda: behind(matroska.element(0x1941A469, matroska.element(0x61A7, bytes(30 * MIB)))),
        None,
    ),
    "gif of 20,000 frames": (lambda: images.long_gif(20_000), None),
    "gif of 16,000 x 16,000": (lambda: attacks.claiming("GIF", 16_000, 16_000), False),
}
"""By name: what makes the bytes, and whether they are served; None if both are right."""


def is_served(encoded: bytes, limits: VideoLimits) -> bool:
    """Read header and first frame of *encoded*; return whether both are there, and fail unless it is refused properly."""
    try:
        header = read_header(encoded, limits)
        assert header.num_frames <= limits.max_frames
        (frame,) = read_frames(encoded, header, [0], limits)
    except RequestError as error:
        assert isinstance(error, (InvalidVideo, UnsupportedVideoFormat, VideoTooLarge))  # noqa: PT017
        return False
    return frame.shape == (header.height, header.width, 3)


@table("name", VIDEOS)
def test_a_video_bomb_is_served_or_refused(name: str) -> None:
    make, expected = VIDEOS[name]
    served = is_served(make(), VideoLimits())
    assert expected is None or served == expected


SMALL = zlib.compress(bytes(100 * MIB), 9)
"""A tenth of a megabyte that is 100 MiB."""

METADATA: dict[str, Callable[[], bytes]] = {
    "png zTXt": partial(attacks.png_chunks, b"zTXt", 1, b"a\0\0" + SMALL),
    "png profile": partial(attacks.png_chunks, b"zTXt", 1, b"Raw profile type exif\0\0" + SMALL),
    "png XMP": partial(attacks.png_chunks, b"iTXt", 1, b"XML:com.adobe.xmp\0\1\0\0\0" + SMALL),
    "png iCCP": partial(attacks.png_chunks, b"iCCP", 1, b"a\0\0" + SMALL),
    "png Exif": partial(attacks.png_chunks, b"eXIf", 1, bytes(30 * MIB)),
    "png text": partial(attacks.png_chunks, b"tEXt", 1, b"a\0" + bytes(30 * MIB)),
    "png unknown": partial(attacks.png_chunks, b"zzZz", 1, bytes(30 * MIB)),
    "webp Exif": partial(attacks.webp_chunks, b"EXIF", 1, bytes(30 * MIB)),
    "webp XMP": partial(attacks.webp_chunks, b"XMP ", 1, bytes(30 * MIB)),
    "webp in webp": partial(attacks.webp_chunks, b"RIFF", 1, bytes(30 * MIB)),
    **{f"jpeg {name}": partial(attacks.jpeg_metadata, name, 450) for name in attacks.METADATA},
}
"""By name: what makes an image with as much metadata as fits, or with 100 MiB once it is read."""


@table("name", METADATA)
def test_a_header_is_read_in_a_megabyte_or_two(name: str) -> None:
    """On the event loop, of files up to 64 MiB."""
    encoded = METADATA[name]()
    tracemalloc.start()
    try:
        assert read_image_header(encoded).width == 64
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * MIB

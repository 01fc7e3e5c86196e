"""The supported kinds of videos, and their limits, for the gateway, which runs no decoder.

A container can be as hostile as an image, and the library that parses it is written in C. So media.video reads it in
decode processes.
"""

import re
from dataclasses import dataclass
from importlib.metadata import version

from saccade.errors import InvalidVideo, UnsupportedVideoFormat, VideoTooLarge
from saccade.media.header import image_format, other_format
from saccade.protocol.media import VideoHeader

DECODER = f"pyav-{version('av')} reader-3"
"""The decoder's name and version, which determines FFmpeg's, and that of the rules by which media.video reads rates:
part of every video's identity, since workers keep what older gateways sent."""

ACCEPTED = "MP4, MOV, WebM, Matroska or GIF"
DEMUXERS = (
    ("mov", re.compile(rb"....(?:ftyp|moov|mdat|wide|skip|free)", re.DOTALL)),
    ("matroska", re.compile(rb"\x1a\x45\xdf\xa3")),
    ("gif", re.compile(rb"GIF8[79]a")),
)
"""FFmpeg's names of the containers that are read, and how their bytes begin. None of them names other files."""

FRAMES_PREFIX = "data:video/jpeg;base64,"
"""How frames begin that a client has sampled, in place of a video."""

MIN_FPS, MAX_FPS = 0.001, 1000.0
"""Recordings of a screen on which nothing moves have one frame in minutes."""

BYTES_PER_PIXEL = 56
"""Memory for a pixel of a frame. Up to 31 were measured for the decoder, the RGB frame and the resized data, with few
reference frames; a decoder may hold 16 of those, of 1.5 bytes per pixel."""


@dataclass(frozen=True)
class VideoLimits:
    """A video's limits. *max_pixels* and *max_side* apply to a frame, *max_frames* to the container."""

    max_pixels: int = 4096 * 2304
    max_side: int = 8192
    max_frames: int = 100_000
    max_encoded_bytes: int = 64 << 20

    def check_bytes(self, num_bytes: int) -> None:
        """Raise VideoTooLarge if an encoded video of *num_bytes* is over the limit."""
        if num_bytes > self.max_encoded_bytes:
            raise VideoTooLarge(f"The video has {num_bytes} bytes; at most {self.max_encoded_bytes} are accepted.")

    def check_size(self, width: int, height: int) -> None:
        """Raise VideoTooLarge for frames over a limit, and InvalidVideo for frames without pixels."""
        size = f"The video's frames have {width} x {height} pixels"
        if min(width, height) < 1:
            raise InvalidVideo(f"{size}.")
        if max(width, height) > self.max_side:
            raise VideoTooLarge(f"{size}; a side may have at most {self.max_side}.")
        if width * height > self.max_pixels:
            raise VideoTooLarge(f"{size}; at most {self.max_pixels} in all are accepted.")

    def check_count(self, num_frames: int) -> None:
        """Raise VideoTooLarge if *num_frames*, the number of frames counted so far, is over the limit."""
        if num_frames > self.max_frames:
            raise VideoTooLarge(f"The video has more than {self.max_frames} frames; send a shorter one.")


def demuxer(encoded: bytes) -> str:
    """Return FFmpeg's name for the container, which the content determines.

    Raises UnsupportedVideoFormat, whose message says how to send an image or a PDF instead.
    """
    # AVIF and HEIC begin like MP4.
    image, other = image_format(encoded), other_format(encoded)
    if image in ("", "GIF") and other != "HEIC":
        for name, pattern in DEMUXERS:
            if pattern.match(encoded):
                return name
    if image:
        raise UnsupportedVideoFormat(
            f"The video is a {image} image: send it as `image_url`, or frames of a video as `{FRAMES_PREFIX}`. "
            f"Videos are {ACCEPTED}."
        )
    if other == "PDF":
        raise UnsupportedVideoFormat(f"The video is a PDF: send it as `file` or `image_url`. Videos are {ACCEPTED}.")
    if other:
        raise UnsupportedVideoFormat(f"The video looks like {other}, which is not supported; send {ACCEPTED}.")
    raise UnsupportedVideoFormat(f"The bytes are not a video in a known format; send {ACCEPTED}.")


def decoded_bytes(header: VideoHeader) -> int:
    """Return an estimate of how many bytes of memory decoding takes, one frame at a time."""
    return header.width * header.height * BYTES_PER_PIXEL

"""Reads a JPEG's dimensions and orientation from the segments before its pixels, and checks its coding.

Sources: ITU-T T.81 (annexes B and H), T.87 (JPEG-LS), T.871 (JFIF); Adobe's technical note 5116.
"""

import re
import struct
from collections.abc import Iterator

from saccade.errors import InvalidImage, UnsupportedImageFormat
from saccade.media.orientation import read_orientation

MAX_STEPS = 4096
MAX_EXIF_BYTES = 1 << 20
MAX_JPEG_GAP_BYTES = 1 << 20
"""Bound of the bytes between segments; broken writers leave one or two."""

JPEG_FRAMES = frozenset({*range(0xC0, 0xD0), 0xDE, 0xF7}) - {0xC4, 0xC8, 0xCC}
JPEG_LOSSLESS = 0xC3
JPEG_UNSUPPORTED = {
    **dict.fromkeys((0xC5, 0xC6, 0xC7, 0xCD, 0xCE, 0xCF, 0xDE), "hierarchical"),
    0xCB: "lossless with arithmetic coding",
    0xF7: "JPEG-LS",  # ITU-T T.87
}
JPEG_START, JPEG_END, JPEG_SCAN, JPEG_APP1 = 0xD8, 0xD9, 0xDA, 0xE1
# JFIF's and Adobe's segments define the components' colours (T.871; Adobe's technical note 5116).
JPEG_JFIF, JPEG_ADOBE, ADOBE_TRANSFORM = 0xE0, 0xEE, 11
JPEG_COLOURS = {JPEG_JFIF: b"JFIF\0", JPEG_ADOBE: b"Adobe"}
# Markers of segments and of the image's start and end; zeros, restarts and fill bytes between them mean nothing.
JPEG_MARKER = re.compile(rb"\xff[\x02-\xcf\xd8-\xfe]")
JPEG_XMP = b"http://ns.adobe.com/xap/1.0/\0"


def read(encoded: bytes) -> tuple[int, int, int]:
    """Return the stored width and height, and the orientation as an Exif number.

    Without a frame header, width and height are 0. Raises the errors of jpeg_segments(), and UnsupportedImageFormat for
    a coding that is not decoded.
    """
    size, exif, exif_bytes, xmp, colours = (0, 0), list[bytes](), 0, b"", frozenset[int]()
    for marker, start, end in jpeg_segments(encoded):
        if marker in JPEG_FRAMES:
            bits, height, width, components = struct.unpack_from(">BHHB", encoded, start)
            _check_frame(marker, bits, components, colours)
            size = (width, height)
        elif marker == JPEG_APP1 and encoded.startswith(b"Exif\0\0", start) and exif_bytes < MAX_EXIF_BYTES:
            # An Exif block that is longer than one segment continues in the next one.
            exif.append(encoded[start + 6 : end])
            exif_bytes += end - start
        elif marker == JPEG_APP1 and encoded.startswith(JPEG_XMP, start):
            xmp = encoded[start:end]
        elif marker in JPEG_COLOURS and encoded.startswith(JPEG_COLOURS[marker], start):
            says_rgb = marker == JPEG_ADOBE and encoded[start + ADOBE_TRANSFORM] == 0
            colours |= frozenset() if says_rgb else {marker}
    return *size, read_orientation(b"".join(exif), xmp)


def _check_frame(marker: int, bits: int, components: int, colours: frozenset[int]) -> None:
    """Raise UnsupportedImageFormat for codings that libjpeg-turbo 3 or Pillow 12.3 does not decode.

    *colours* holds each of the JFIF and Adobe markers whose segment says that the components are not RGB or CMYK.
    """
    lossless = "lossless, " if marker == JPEG_LOSSLESS else ""
    if marker in JPEG_UNSUPPORTED:
        kind = JPEG_UNSUPPORTED[marker]
    elif bits != 8:
        kind = f"{lossless}with {bits} bits a sample"
    elif components not in (1, 3, 4):
        kind = f"{lossless}with {components} components"
    elif lossless and ((components == 3 and colours) or (components == 4 and JPEG_ADOBE in colours)):
        kind = "lossless, in other colours than RGB"
    else:
        return
    raise UnsupportedImageFormat(
        f"The JPEG is {kind}, which is not supported; send a baseline or progressive JPEG with 8 bits a sample, or "
        "a PNG."
    )


def jpeg_segments(encoded: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the marker of each segment, and its content's start and end.

    The last is the first scan, or the end of the image; its end is its start. At most MAX_JPEG_GAP_BYTES between
    segments are skipped, as libjpeg does (jdmarker.c, next_marker). Raises InvalidImage if neither comes, and
    struct.error or IndexError if the bytes end early.
    """
    position, gaps = 2, 0
    for _ in range(MAX_STEPS):
        match = JPEG_MARKER.search(encoded, position, position + MAX_JPEG_GAP_BYTES - gaps + 2)
        if match is None:
            break
        gaps += match.start() - position
        marker, start = encoded[match.end() - 1], match.end()
        if marker in (JPEG_SCAN, JPEG_END):
            yield marker, start, start
            return
        (length,) = struct.unpack_from(">H", encoded, start)
        if length < 2 or marker == JPEG_START:
            break
        position = start + length
        yield marker, start + 2, position
    raise InvalidImage("The JPEG's header is damaged: no image data follows it.")

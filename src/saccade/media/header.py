"""Reads an image's format, dimensions and orientation from its bytes, without an image library or a decoder.

Sources: PNG third edition; WebP container RFC 9649; VP8 RFC 6386 section 9.1; GIF89a. saccade.media.jpeg_header, .avif,
.bmp_header and .orientation name the sources for JPEG, AVIF, BMP and Exif. The work is bounded because it runs on the
event loop. At most MAX_STEPS segments, chunks or blocks are visited, and little more than MAX_EXIF_BYTES are copied.
"""

import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from saccade.errors import ImageTooLarge, InvalidImage, UnsupportedImageFormat
from saccade.media import avif, bmp_header, jpeg_header
from saccade.media.orientation import (
    MAX_TEXT_BYTES,
    PROFILE_KEYWORD,
    UPRIGHT,
    XMP_KEYWORD,
    exif_orientation,
    png_text,
    raw_profile,
    read_orientation,
)

MAX_STEPS = 4096
MAX_EXIF_BYTES = 1 << 20
ACCEPTED = "JPEG, PNG, WebP, GIF, AVIF or BMP"
# Pillow refuses images over twice its warning threshold; below that only the limits of this module apply.
DECODER_MAX_PIXELS = 178_956_970
# The most memory that one image takes in a decode process, from the file to the patches; measured by a test.
DECODED_BYTES_PER_PIXEL = {"JPEG": 12, "PNG": 11, "GIF": 11, "WebP": 18, "AVIF": 18, "BMP": 11}

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PNG_TEXTS = frozenset({b"tEXt", b"zTXt", b"iTXt"})
WEBP_HAS_EXIF, WEBP_HAS_XMP = 0x08, 0x04

OTHER_FORMATS = (
    ("TIFF", re.compile(rb"II[*+]\0|MM\0[*+]")),
    ("HEIC", re.compile(rb"....ftyp(?:hei|hev|mif1|msf1)", re.DOTALL)),
    # Older QuickTime files, of cameras, do not state their kind.
    ("MOV video", re.compile(rb"....(?:ftypqt|moov|mdat|wide|skip|free)", re.DOTALL)),
    ("M4A audio", re.compile(rb"....ftypM4[AB]", re.DOTALL)),
    ("MP4 video", re.compile(rb"....ftyp", re.DOTALL)),
    ("WebM or Matroska video", re.compile(rb"\x1a\x45\xdf\xa3")),
    ("AVI video", re.compile(rb"RIFF....AVI ", re.DOTALL)),
    ("FLV video", re.compile(rb"FLV\x01")),
    ("MPEG video", re.compile(rb"\0\0\x01[\xb3\xba]|G.{187}G", re.DOTALL)),
    ("WMV video", re.compile(rb"\x30\x26\xb2\x75\x8e\x66\xcf\x11")),
    ("Ogg", re.compile(rb"OggS")),
    ("WAV audio", re.compile(rb"RIFF....WAVE", re.DOTALL)),
    ("MP3 audio", re.compile(rb"ID3|\xff[\xf2\xf3\xfb]")),
    ("FLAC audio", re.compile(rb"fLaC")),
    ("JPEG 2000", re.compile(rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51")),
    ("JPEG XL", re.compile(rb"\xff\x0a|\0\0\0\x0cJXL ")),
    # TGA has no signature: colour map, kind of image, the map's size, origin and sides, bits of a pixel.
    ("TGA", re.compile(rb".(?:\0[\x02\x03\x0a\x0b]\0{5}|\x01[\x01\x09]..(?!\0\0)..[\x0f\x10\x18\x20]).{4}(?!\0\0).."
                       rb"(?!\0\0)..[\x08\x0f\x10\x18\x20][\0-\x3f]", re.DOTALL)),
    ("ICO", re.compile(rb"\0\0\x01\0")),
    ("CUR", re.compile(rb"\0\0\x02\0")),
    ("PSD", re.compile(rb"8BPS")),
    ("ZIP", re.compile(rb"PK\x03\x04")),
    ("gzip", re.compile(rb"\x1f\x8b")),
    ("HTML", re.compile(rb"\s*<(?:!doctype\s+html|html)", re.IGNORECASE)),
    ("SVG", re.compile(rb"(?:\xef\xbb\xbf)?\s*<(?:svg|[?!].*<svg)", re.DOTALL)),
    # The last one, so that an image with a PDF's header in it stays an image.
    ("PDF", re.compile(rb"%PDF|.{0,1019}%PDF-", re.DOTALL)),
)  # fmt: skip
SIGNATURE_BYTES = 1024
"""A PDF's signature is anywhere in these first bytes of a file (PDF 1.7, appendix H), others at the beginning."""
SERVED_VIDEOS = {"MP4 video": "video/mp4", "MOV video": "video/quicktime", "WebM or Matroska video": "video/webm"}
"""The media types of videos in OTHER_FORMATS that are served as videos."""


@dataclass(frozen=True)
class ImageHeader:
    """An image's format, dimensions and orientation, as its header states them."""

    format: str
    width: int
    """Pixels as stored, like *height*."""
    height: int
    orientation: int = 1
    """Exif's number, 1 to 8."""

    @property
    def upright(self) -> tuple[int, int]:
        """Width and height in pixels once the image is upright; orientations 5 to 8 swap the sides."""
        return (self.height, self.width) if self.orientation >= 5 else (self.width, self.height)

    @property
    def decoded_bytes(self) -> int:
        """An estimate of how many bytes of memory decoding takes."""
        return self.width * self.height * DECODED_BYTES_PER_PIXEL[self.format]


@dataclass(frozen=True)
class MediaLimits:
    """How many images and videos a request may have. Each video may occupy a decode process for half a minute."""

    images: int = 16
    videos: int = 4

    def __str__(self) -> str:
        """The limits in the format of vLLM's --limit-mm-per-prompt."""
        return json.dumps({"image": self.images, "video": self.videos})


@dataclass(frozen=True)
class ImageLimits:
    """The limits that an image's header must meet before the image is decoded. Sides and areas are in pixels.

    *max_request_pixels* is for all images of a request together, and is checked elsewhere.
    """

    max_pixels: int = 50_000_000
    max_side: int = 32_768
    max_aspect: int = 32_768
    max_encoded_bytes: int = 64 << 20
    max_request_pixels: int = 200_000_000

    def check_header(self, header: ImageHeader, encoded_bytes: int) -> None:
        """Raise ImageTooLarge if *header* or the encoded length is over a limit."""
        long, short = max(header.width, header.height), min(header.width, header.height)
        size = f"The image has {header.width} x {header.height} pixels"
        if encoded_bytes > self.max_encoded_bytes:
            raise ImageTooLarge(f"The image has {encoded_bytes} bytes; at most {self.max_encoded_bytes} are accepted.")
        if long > self.max_side:
            raise ImageTooLarge(f"{size}; a side may have at most {self.max_side}.")
        if long * short > min(self.max_pixels, DECODER_MAX_PIXELS):
            raise ImageTooLarge(
                f"{size}, {long * short:,} in all; at most {min(self.max_pixels, DECODER_MAX_PIXELS):,} are accepted "
                "(--max-image-pixels). Send it smaller."
            )
        if long > self.max_aspect * short:
            raise ImageTooLarge(f"{size}; its long side may be at most {self.max_aspect} times its short one.")


def read_header(encoded: bytes) -> ImageHeader:
    """Return an encoded image's format, stored dimensions and orientation. Its content determines the format.

    Raises UnsupportedImageFormat for formats and codings that are not decoded, and InvalidImage for a damaged header or
    a side below 1.
    """
    try:
        header = _parse(encoded)
    except (struct.error, IndexError):
        raise InvalidImage("The image ends within its header: it is truncated.") from None
    if header.width < 1 or header.height < 1:
        raise InvalidImage(f"The image's header states {header.width} x {header.height} pixels.")
    return header


def image_format(encoded: bytes) -> str:
    """Return which of the ACCEPTED formats an image's first bytes indicate, or "" for any other."""
    if encoded.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if encoded.startswith(PNG_SIGNATURE):
        return "PNG"
    if encoded.startswith(b"RIFF") and encoded[8:12] == b"WEBP":
        return "WebP"
    if encoded.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    if encoded.startswith(b"BM"):
        return "BMP"
    return "AVIF" if avif.is_avif(encoded) else ""


def other_format(encoded: bytes) -> str:
    """Return the format that the first bytes indicate if it is not accepted; "" for accepted and unknown formats."""
    start = encoded[:SIGNATURE_BYTES]
    if image_format(start):
        return ""
    return next((name for name, pattern in OTHER_FORMATS if pattern.match(start)), "")


def _parse(encoded: bytes) -> ImageHeader:
    match image_format(encoded):
        case "JPEG":
            return ImageHeader("JPEG", *jpeg_header.read(encoded))
        case "PNG":
            return _png(encoded)
        case "WebP":
            return _webp(encoded)
        case "GIF":
            return _gif(encoded)
        case "AVIF":
            return _avif(encoded)
        case "BMP":
            bmp = bmp_header.read(encoded)
            return ImageHeader("BMP", bmp.width, bmp.height)
    if not encoded:
        raise InvalidImage("The image has no bytes.")
    if not (name := other_format(encoded)):
        raise UnsupportedImageFormat(f"The bytes are not an image in a known format; send {ACCEPTED}.")
    instead = "send it as `video_url` to a model that takes videos, or send" if name in SERVED_VIDEOS else "send"
    raise UnsupportedImageFormat(f"The image looks like {name}, which is not supported; {instead} {ACCEPTED}.")


def _png(encoded: bytes) -> ImageHeader:
    if encoded[12:16] != b"IHDR":
        raise InvalidImage("The PNG does not begin with its header.")
    width, height = struct.unpack_from(">II", encoded, 16)
    exif, texts = None, dict[bytes, tuple[bytes, int, int]]()
    for kind, start, end in islice(png_chunks(encoded), MAX_STEPS):
        if kind == b"eXIf":
            exif = start + 8, min(end - 4, start + 8 + MAX_EXIF_BYTES)
        elif kind in PNG_TEXTS:
            for keyword in (XMP_KEYWORD, PROFILE_KEYWORD):
                if encoded.startswith(keyword + b"\0", start + 8):
                    texts[keyword] = kind, start + 8, end - 4
    # Texts are inflated once the last of each keyword is known.
    xmp, profile = (png_text(encoded, *texts[key]) if key in texts else b"" for key in (XMP_KEYWORD, PROFILE_KEYWORD))
    block = encoded[slice(*exif)] if exif else raw_profile(profile)
    return ImageHeader("PNG", width, height, read_orientation(block, xmp))


def png_chunks(encoded: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield each chunk's kind, start and end. The last end may lie beyond the bytes.

    A chunk starts with its length, and ends with its checksum.
    """
    position = len(PNG_SIGNATURE)
    while position + 8 <= len(encoded):
        (length,) = struct.unpack_from(">I", encoded, position)
        end = position + 12 + length
        yield encoded[position + 4 : position + 8], position, end
        position = end


def _webp(encoded: bytes) -> ImageHeader:
    kind = encoded[12:16]
    if kind == b"VP8X":
        flags = encoded[20]
        width, height = (1 + int.from_bytes(_exactly(encoded, start, 3), "little") for start in (24, 27))
        exif = _webp_chunk(encoded, b"EXIF", MAX_EXIF_BYTES) if flags & WEBP_HAS_EXIF else b""
        xmp = _webp_chunk(encoded, b"XMP ", MAX_TEXT_BYTES) if flags & WEBP_HAS_XMP else b""
        return ImageHeader("WebP", width, height, read_orientation(exif, xmp))
    if kind == b"VP8L" and encoded[20] == 0x2F:
        (bits,) = struct.unpack_from("<I", encoded, 21)
        return ImageHeader("WebP", 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF))
    if kind == b"VP8 " and _exactly(encoded, 23, 3) == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", encoded, 26)
        return ImageHeader("WebP", width & 0x3FFF, height & 0x3FFF)
    raise InvalidImage("The WebP's first chunk is damaged.")


def _webp_chunk(encoded: bytes, kind: bytes, max_bytes: int) -> bytes:
    position = 12
    for _ in range(MAX_STEPS):
        if position + 8 > len(encoded):
            break
        (length,) = struct.unpack_from("<I", encoded, position + 4)
        if encoded.startswith(kind, position):
            return encoded[position + 8 : position + 8 + min(length, max_bytes)]
        position += 8 + length + length % 2
    return b""


def _gif(encoded: bytes) -> ImageHeader:
    width, height, flags = struct.unpack_from("<HHB", encoded, 6)
    position = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    in_extension = False
    for _ in range(MAX_STEPS):
        byte = encoded[position]
        if in_extension:  # a block: its length, then its content; an empty block is the last
            position, in_extension = position + 1 + byte, byte > 0
        elif byte == 0x21:
            position, in_extension = position + 2, True
        elif byte == 0x2C:
            # A first frame that exceeds the canvas enlarges it, as in browsers and decoders.
            left, top, frame_width, frame_height = struct.unpack_from("<HHHH", encoded, position + 1)
            return ImageHeader("GIF", max(width, left + frame_width), max(height, top + frame_height))
        elif byte == 0x3B:
            raise InvalidImage("The GIF has no frame.")
        else:
            position += 1
    raise InvalidImage("The GIF has too many blocks before its first frame.")


def _avif(encoded: bytes) -> ImageHeader:
    width, height, orientation = avif.read(encoded)
    if orientation == UPRIGHT:
        exif, xmp = avif.metadata(encoded)
        # Exif repeats what the boxes say and does not turn the image; an orientation in it keeps XMP from doing so.
        orientation = UPRIGHT if exif_orientation(exif) is not None else read_orientation(b"", xmp)
    return ImageHeader("AVIF", width, height, orientation)


def _exactly(encoded: bytes, start: int, length: int) -> bytes:
    piece = encoded[start : start + length]
    if len(piece) < length:
        raise InvalidImage("The image ends within its header: it is truncated.")
    return piece
